"""The prime_rl backend against a counterpart of its own: what is on the wire, the handshake, whole
runs, and what goes wrong.
"""

import os
import signal
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain import train
from retrain.backends.local.backend import LocalBackend
from retrain.backends.prime_rl.backend import PrimeDialect, output_dir
from retrain.backends.prime_rl.wire import (
    Broadcasts,
    FileSystemSender,
    Policy,
    ZmqSender,
    encode,
    share_out,
    trained_rows,
)
from retrain.config.load import replaced
from retrain.config.schema import PrimeRLOptions
from retrain.errors import ConfigurationError, Interrupted, ServerFailure
from retrain.inference_engine.http import ServerPool
from retrain.types import Completion, Example, FinishReason, Prompt, Row, Trajectory
from tests.marks import first_of
from tests.prime_counterpart import (
    V090,
    Broadcaster,
    FileReceiver,
    InferenceServer,
    Trainer,
    ZmqReceiver,
    decode,
    inference_server,
    rows_of,
)
from tests.real_servers import free_port
from tests.runs import small, small_run

FAST = {"sync_wait_s": 30, "sync_poll_s": 0.01}


def row(prompt: int, spans: tuple[tuple[int, int], ...], length: int, kept: bool = False) -> Row:
    """Token i is 10 i; action number j has log-prob -j - 1 and advantage j + 0.5."""
    actions = sum(stop - start for start, stop in spans)
    return Row(
        token_ids=np.arange(length, dtype=np.int32) * 10,
        spans=spans,
        logprobs=-np.arange(1, actions + 1, dtype=np.float32),
        advantages=np.arange(actions, dtype=np.float32) + np.float32(0.5),
        group=prompt,
        kept_ids=tuple(np.arange(j + 1, dtype=np.int32) for j in range(actions)) if kept else None,
    )


# -- the wire --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [V090, None], ids=["v0.9.0", "later"])
def test_a_receiver_of_v090_and_a_later_one_read_the_same_streams(fields: Any) -> None:
    rows = [row(0, ((2, 5),), 5), row(1, ((1, 2), (3, 4)), 6)]
    (batch,) = decode(encode([rows], 0.7), *([fields] if fields else []))
    assert batch.input_ids == [0, 10, 20, 30, 40, 0, 10, 20, 30, 40, 50]
    assert batch.loss_mask == [place in (2, 3, 4, 6, 8) for place in range(11)]
    assert batch.advantages == [0, 0, 0.5, 1.5, 2.5, 0, 0.5, 0, 1.5, 0, 0]
    assert batch.inference_logprobs == [0, 0, -1, -2, -3, 0, -1, 0, -2, 0, 0]
    assert batch.position_ids == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    # The first action is scored with the entry of the context token before it.
    assert batch.temperatures == [0.7] * 11
    assert batch.sequence_lengths == batch.seq_lens == [5, 6]
    assert set(batch.env_names) != {"all"}
    assert batch.ref_logprobs is batch.rl_weights is None
    (whole,) = decode(encode([rows], 0.7))
    for sent, got in zip(rows, rows_of(whole), strict=True):
        assert sent.spans == got.spans and (sent.token_ids == got.token_ids).all()
        assert (sent.logprobs == got.logprobs).all() and (sent.advantages == got.advantages).all()


def test_kept_sets_are_counted_per_token_and_listed_one_after_another() -> None:
    whole, cut = row(0, ((1, 3),), 3), row(1, ((1, 2), (3, 4)), 4, kept=True)
    (batch,) = decode(encode([[whole, cut]], 1.0))
    ids, counts = (np.frombuffer(part, "<i4") for part in batch.sampling_mask)
    assert counts.tolist() == [0, 0, 0, 0, 1, 0, 2] and ids.tolist() == [0, 0, 1]
    assert decode(encode([[whole]], 1.0))[0].sampling_mask is None


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_as_many_micro_batches_within_the_budget(ranks: int) -> None:
    lengths = (5, 9, 3, 4, 4, 7, 30)
    shares = share_out([row(0, ((1, length),), length) for length in lengths], ranks, 10)
    assert len({len(share) for share in shares}) == 1
    packs = [pack for share in shares for pack in share]
    assert all(sum(len(one.token_ids) for one in pack) <= 10 or len(pack) == 1 for pack in packs)
    actions = [one.num_actions for pack in packs for one in pack if one.num_actions]
    assert sorted(actions) == [2, 3, 3, 4, 6, 8, 29]


def test_a_step_without_anything_to_learn_is_a_batch_without_actions() -> None:
    """The trainer waits for every step's file, so none may be left out."""
    (batch,) = decode(encode(share_out(trained_rows([]), 1, 0)[0], 1.0))
    assert batch.loss_mask == [False, False] and list(rows_of(batch)) == []


# -- the transports --------------------------------------------------------------------------------


def test_a_file_appears_whole_under_both_names(tmp_path: Path) -> None:
    sender = FileSystemSender(tmp_path)
    sender.ready(0)
    sender.send(3, [b"first", b"second"])
    for name in ("rollouts", "batches"):  # of v0.9.0 and of later versions
        files = [tmp_path / name / "step_3" / f"rank_{rank}.bin" for rank in (0, 1)]
        assert [file.read_bytes() for file in files] == [b"first", b"second"]
    assert not list(tmp_path.glob("**/*.tmp"))


def test_an_interrupted_sessions_files_are_cleared_and_anothers_refused(tmp_path: Path) -> None:
    sender = FileSystemSender(tmp_path)
    sender.ready(0)
    for batch in (1, 2, 3):
        sender.send(batch, [b"x"])
    FileSystemSender(tmp_path).ready(2)
    left = {file.parent.name for file in tmp_path.glob("rollouts/*/rank_0.bin")}
    assert left == {"step_1", "step_2"}
    other = tmp_path / "other" / "rollouts" / "step_1"
    other.mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="holds batches that this retrain did not write"):
        FileSystemSender(tmp_path / "other").ready(0)


def test_only_the_first_call_looks_for_anothers_files(tmp_path: Path) -> None:
    sender = FileSystemSender(tmp_path)
    sender.ready(0)
    sender.send(1, [b"x"])
    (tmp_path / "rollouts" / ".made-by-retrain").unlink()
    sender.ready(1)
    assert (tmp_path / "rollouts/step_1/rank_0.bin").exists()


def test_zmq_reaches_each_rank_on_its_topic_and_says_when_one_has_gone() -> None:
    """Every socket is closed also where the test fails: a context that is collected with open ones
    waits for ever, in some other test.
    """
    options = PrimeRLOptions(transport="zmq", zmq_port=free_port(2), trainer_ranks=2, **FAST)
    with ExitStack() as stack:
        sender = stack.enter_context(closing(ZmqSender(options)))
        ranks = [receiver(stack, options, rank) for rank in (0, 1)]
        sender.send(1, [b"for 0", b"for 1"])
        assert [rank.receive(1, lambda: False) for rank in ranks] == [b"for 0", b"for 1"]
        ranks[1].close()
        sender._options = options.model_copy(update={"sync_wait_s": 0.1})
        while not refuses(sender):
            time.sleep(0.01)
        told = r"1 of 2 data ranks did not subscribe .* Start the trainer"
        with pytest.raises(ServerFailure, match=told):
            sender.send(2, [b"", b""])
        sender._options = options
        ranks[1] = receiver(stack, options, 1)  # a trainer that starts anew
        sender.send(2, [b"a", b"b"])
        assert [rank.receive(2, lambda: False) for rank in ranks] == [b"a", b"b"]


def receiver(stack: ExitStack, options: PrimeRLOptions, rank: int) -> ZmqReceiver:
    return stack.enter_context(closing(ZmqReceiver(options.zmq_port, rank)))


def refuses(sender: ZmqSender) -> bool:
    try:
        sender.ready(0)
    except ServerFailure:
        return True
    return False


# -- the handshake ---------------------------------------------------------------------------------


def broadcasts(folder: Path, wait_s: float = 0.2) -> Broadcasts:
    return Broadcasts(folder / "broadcasts", wait_s=wait_s, poll_s=0.01)


def weights(folder: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(1000, np.float32)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"r": 4}')


def in_thread(work: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def test_a_version_is_acknowledged_before_its_write_and_taken_after_its_end(tmp_path: Path) -> None:
    trainer = Broadcaster(tmp_path)
    thread = in_thread(trainer.broadcast, 0, weights)
    policy = broadcasts(tmp_path, 5).take(0)
    thread.join()
    assert policy.version == 0 and policy.name
    marks = {file.name for file in policy.folder.glob(".*")}
    assert marks == {".sender_ready", ".receiver_ready", ".started", ".finished"}


def test_a_trainer_that_never_offers_is_named_with_the_folder_and_the_key(tmp_path: Path) -> None:
    told = r"v0 in .*broadcasts within sync_wait_s = 0.2 s .*no policy has come yet"
    with pytest.raises(ServerFailure, match=f"did not offer policy {told}"):
        broadcasts(tmp_path).take(0)


def test_an_offer_that_is_never_finished_is_told_apart(tmp_path: Path) -> None:
    folder = Broadcaster(tmp_path).offer(0)
    with pytest.raises(ServerFailure, match="heard back, but it has not begun to write it"):
        broadcasts(tmp_path).take(0)
    (folder / ".started").touch()
    (folder / ".receiver_ready").unlink()
    told = "heard back, but it began to write it and did not finish"
    with pytest.raises(ServerFailure, match=told):
        broadcasts(tmp_path).take(0)


def test_a_late_version_lets_the_step_begin_with_the_one_before(tmp_path: Path) -> None:
    receiver, trainer = broadcasts(tmp_path), Broadcaster(tmp_path)
    thread = in_thread(trainer.broadcast, 0, weights)
    assert receiver.take(0).version == 0
    thread.join()
    assert receiver.take(1).version == 0  # batch 2 may be sampled with v0 and no batch later
    with pytest.raises(ServerFailure, match=r"did not offer policy v2 .*the newest is v0"):
        receiver.take(2)
    thread = in_thread(trainer.broadcast, 1, weights)
    time.sleep(0.05)
    assert receiver.take(2).version == 1
    thread.join()


def test_a_trainer_that_starts_anew_is_answered_again(tmp_path: Path) -> None:
    """It waits for every offer, also of a version that was received before."""
    receiver, trainer = broadcasts(tmp_path, 5), Broadcaster(tmp_path)
    for receipt in (0, 1):
        thread = in_thread(trainer.broadcast, 4, weights)
        deadline = time.monotonic() + 5
        while receiver.take(4).receipt != receipt:
            assert time.monotonic() < deadline
        thread.join()


def test_a_trainer_ahead_of_the_run_is_not_followed(tmp_path: Path) -> None:
    Broadcaster(tmp_path).offer(7)
    told = r"offers policy v7 .*has sent 3 batches. Resume the trainer at step 3"
    with pytest.raises(ServerFailure, match=told):
        broadcasts(tmp_path).take(3)
    assert not (tmp_path / "broadcasts" / "step_7" / ".receiver_ready").exists()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [("cut", "is incomplete despite its mark of completion"), ("none", "holds no weights")],
)
def test_a_truncated_policy_is_not_served(tmp_path: Path, damage: str, sentence: str) -> None:
    def write(folder: Path) -> None:
        if damage == "cut":
            weights(folder)
            file = folder / "adapter_model.safetensors"
            file.write_bytes(file.read_bytes()[:-100])

    thread = in_thread(Broadcaster(tmp_path).broadcast, 0, write)
    with pytest.raises(ServerFailure, match=sentence):
        broadcasts(tmp_path, 5).take(0)
    thread.join()


# -- whole runs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    backend = LocalBackend(small(tmp_path_factory.mktemp("learner")))
    yield backend
    backend.close()


@pytest.fixture
def server(learner: LocalBackend, tmp_path: Path) -> Iterator[InferenceServer]:
    with inference_server(small(tmp_path), learner) as found:
        yield found


def prime(
    folder: Path, server: InferenceServer, transport: str = "filesystem", **sections: Any
) -> Any:
    options = FAST | {"transport": transport, "output_dir": str(folder / "shared")}
    options |= sections.pop("options", {})
    backend = {"backend": "prime_rl", "options": options}
    return small(folder / "run", backend=backend, inference={"url": server.url}, **sections)


@contextmanager
def trainer_of(config: Any, learner: LocalBackend, **settings: Any) -> Iterator[Trainer]:
    options = config.backend.prime_rl
    folder = output_dir(config)
    where = settings.pop("where", "rollouts")
    by_zmq = options.transport == "zmq"
    receiver = ZmqReceiver(options.zmq_port) if by_zmq else FileReceiver(folder, where)
    trainer = Trainer(learner, folder, receiver, **{"steps": config.training.max_steps, **settings})
    trainer.start()
    try:
        yield trainer
    finally:
        trainer.stop()


@pytest.mark.parametrize("transport", first_of(["zmq", "filesystem"]))
def test_a_run_trains_through_the_wire(
    tmp_path: Path, learner: LocalBackend, server: InferenceServer, transport: str
) -> None:
    """Held-out prompts are asked again at each other policy, so a prefix cache without a salt would
    answer for an old one.
    """
    sections = {
        "training": {"micro_batch_tokens": 200},
        "evaluation": {"every": 2, "max_examples": 2},
    }
    config = prime(tmp_path, server, transport, options={"zmq_port": free_port(2)}, **sections)
    with trainer_of(config, learner) as trainer:
        run = train(config, quiet=True)
        trainer.join(timeout=20)
    assert trainer.error is None and sorted(trainer.batches) == [1, 2, 3, 4]
    records = run.records()
    assert [record.loss for record in records] == [None] * 4
    assert all(record.loss_is_placeholder for record in records)
    sent = [
        sum(1 for batch in trainer.batches[step] for _ in rows_of(batch)) for step in (1, 2, 3, 4)
    ]
    assert sent == [record.num_datums for record in records] and sum(sent)
    assert [path for path, _ in server.calls].count("/load_lora_adapter") == 5  # v0 to v4
    assert server.stale == 0 and max(trainer.differences) < 1e-3
    folders = run.folder / "checkpoints" / "final", tmp_path / "shared" / "broadcasts" / "step_4"
    own, served = ((one / "adapter_model.safetensors").read_bytes() for one in folders)
    assert own == served


@pytest.mark.slow
def test_a_run_whose_trainer_dies_while_a_step_is_sampled_is_saved_and_goes_on(
    tmp_path: Path, learner: LocalBackend, server: InferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte of the batch was sent, so the state is that between two steps."""
    options = {"zmq_port": free_port(2), "sync_wait_s": 2}
    config = prime(tmp_path, server, "zmq", options=options, training={"save_every": 50})
    usual = server._inference_v1_generate
    with trainer_of(config, learner) as trainer:

        def dies(body: Any) -> Any:
            if server.policy.endswith("step_2"):
                trainer.stop()
            return usual(body)

        monkeypatch.setattr(server, "_inference_v1_generate", dies)
        told = r"1 of 1 data ranks did not subscribe .* The run is saved after 2 steps: continue"
        with pytest.raises(ServerFailure, match=f"{told} with"):
            small_run(config, quiet=True)
    monkeypatch.undo()
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert saved.name == "step_000002"
    with trainer_of(config, learner, first=3) as trainer:
        again = small_run(replaced(config, {"resume.from": str(tmp_path / "run")}), quiet=True)
    assert trainer.error is None and [record.step for record in again.records()] == [0, 1, 2, 3]


def test_a_step_that_was_sent_in_part_is_not_called_saved(
    tmp_path: Path, learner: LocalBackend, server: InferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> None:
        raise ServerFailure("Half of it was sent.")

    monkeypatch.setattr(ZmqSender, "send", breaks)
    config = prime(tmp_path, server, "zmq", options={"zmq_port": free_port(2)})
    told = "Step 0 was under way and is not on disk; the run has no checkpoint yet, so a resume"
    refused = pytest.raises(ServerFailure, match=rf"Half of it was sent\. {told} begins at step 0")
    with trainer_of(config, learner), refused:
        small_run(config, quiet=True)
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_a_signal_ends_the_wait_for_a_trainer(tmp_path: Path, server: InferenceServer) -> None:
    def stop() -> None:
        while not (tmp_path / "shared" / "rollouts").exists():  # made just before the wait
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    in_thread(stop)
    started = time.monotonic()
    with pytest.raises(Interrupted):
        small_run(prime(tmp_path, server, options={"sync_wait_s": 300}), quiet=True)
    assert time.monotonic() - started < 100


SEEDS_BLOCK = """
[backend]
backend = "prime_rl"
adapter_path = "{folder}"
[backend.options] # backend-specific options (example for prime_rl)
transport = "filesystem" # filesystem | zmq
zmq_host = "localhost" # used when transport = "zmq"
zmq_port = 5555 # used when transport = "zmq"
zmq_hwm = 10 # used when transport = "zmq"
strict_advantages = true # must remain true; false is rejected to prevent silent aggregation
sync_wait_s = 30 # max wait for broadcast weights in checkpoint()
sync_poll_s = 0.2 # polling interval for broadcast weights
"""
"""As the annotated configuration has it, in a folder of the test."""


@pytest.mark.slow
def test_the_documented_block_runs_with_a_later_trainer_and_is_resumed(
    tmp_path: Path, learner: LocalBackend, server: InferenceServer
) -> None:
    """adapter_path is the trainer's output_dir. The trainer vanishes after two batches, and both
    sides go on from step 2.
    """
    backend = tomllib.loads(SEEDS_BLOCK.format(folder=tmp_path / "shared"))["backend"]
    backend["options"] |= {"sync_wait_s": 5}
    config = small(tmp_path / "run", backend=backend, inference={"url": server.url})
    shared = tmp_path / "shared"
    gone = Trainer(learner, shared, FileReceiver(shared, "batches"), steps=2)
    gone.start()
    told = r"did not offer policy v4 .*continue with `retrain .* --resume"
    with pytest.raises(ServerFailure, match=told):
        small_run(replaced(config, {"training.max_steps": 8}), quiet=True)
    gone.stop()
    again = replaced(config, {"training.max_steps": 6, "resume.from": str(tmp_path / "run")})
    # Batches 3 and 4 still lie there.
    with trainer_of(config, learner, first=3, steps=6, where="batches") as trainer:
        run = small_run(again, quiet=True)
        trainer.join(timeout=20)
    assert trainer.error is None and sorted(trainer.batches) == [3, 4, 5, 6]
    assert [record.step for record in run.records()] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("refused", [False, True])
def test_whole_weights_are_read_while_the_server_stands_and_it_always_resumes(
    tmp_path: Path, server: InferenceServer, refused: bool
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    weights(folder)
    (folder / "adapter_config.json").unlink()
    dialect, said = PrimeDialect(small(tmp_path, inference={"url": server.url}), [0]), None
    served = Policy("", folder, 3, 0)
    pool = ServerPool(dialect)
    server.fail = {"/update_weights": 400} if refused else {}
    try:
        pool.run(pool.on_each(lambda one: dialect.load(one, served)))
    except ServerFailure as error:
        said = str(error)
    pool.close()
    pause = "/pause?mode=keep&clear_cache=false"
    assert [path for path, _ in server.calls] == [pause, "/update_weights", "/resume"]
    assert server.calls[1][1] == {"weight_dir": str(folder)} and not server.paused
    assert (said is not None and "answered 400: injected" in said) is refused


def test_raw_logprobs_are_found_out(
    tmp_path: Path, server: InferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path, inference={"url": server.url}, training={"temperature": 0.7})
    dialect, served = PrimeDialect(config, [0]), Policy("policy", tmp_path, 0, 0)
    pool = ServerPool(dialect)

    def check() -> None:
        pool.run(pool.on_each(lambda one: dialect.check_logprobs(one, served)))

    check()
    raw = [{"token_id": token, "logprob": -1.0} for token in (3, 4)]
    answer = {"choices": [{"logprobs": {"content": [{"top_logprobs": raw}]}}]}
    monkeypatch.setattr(server, "_inference_v1_generate", lambda body: answer)
    told = r"up to 0\.736\)\. Start it with logprobs_mode = processed_logprobs"
    with pytest.raises(ServerFailure, match=told):
        check()
    pool.close()


def test_kept_sets_of_an_answer_reach_the_wire() -> None:
    """The server lists the tokens of each set, and the trainer renormalizes over them."""
    sets = ([5, 2], [7], [1, 2, 3])
    ids, logprobs = np.array([5, 7, 3], np.int32), np.zeros(3, np.float32)
    completion = Completion(0, 0, ids, logprobs, None, FinishReason.LENGTH)
    completion = replace(completion, kept_ids=tuple(np.array(ids, np.int32) for ids in sets))
    prompt = Prompt(Example("", ""), "", np.array([1, 2], np.int32))
    (sent,) = Row.of(prompt, Trajectory.of(completion), np.ones(3, np.float32), 0)
    (batch,) = decode(encode([[sent]], 1.0))
    ids, counts = (np.frombuffer(part, "<i4").tolist() for part in batch.sampling_mask)
    assert counts == [0, 0, 2, 1, 3] and ids == [5, 2, 7, 1, 2, 3]


def test_a_campaign_and_the_kept_denominator_are_refused(tmp_path: Path) -> None:
    conditions = [{"advantage_mode": "grpo", "transform_mode": "none"}]
    campaign = {"campaign": {"seeds": [1], "conditions": conditions}}
    kept = {"algorithm": {"surprisal_mask_denominator": "kept"}}
    for sections, told in (
        (campaign, "all runs of a campaign would feed one trainer"),
        (kept, "divides by all sampled tokens"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            small(tmp_path, backend={"backend": "prime_rl"}, **sections)
