"""Where examples come from, what is dropped and said, and what is held out."""

import json
import os
import subprocess
import sys
import textwrap
from decimal import Decimal
from itertools import repeat
from pathlib import Path

import pytest

from retrain.config import TrainConfig
from retrain.config.load import load_config, replaced
from retrain.data import Example, NoHeldOutSplit, contamination_note, load_examples, register_source
from retrain.data.readers import HubData, find_files
from retrain.data.sources import MATH_SUBJECTS
from retrain.errors import ConfigurationError

SAMPLES = Path(__file__).parent / "data"


def config(evaluation=None, max_examples=0, **data) -> TrainConfig:
    return TrainConfig.model_validate(
        {"data": data, "evaluation": evaluation or {}, "training": {"max_examples": max_examples}}
    )


def write_jsonl(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def test_a_row_ends_at_its_newline_whatever_else_ends_a_line(tmp_path: Path) -> None:
    row = {"prompt": "1\u20282\u20293\x854", "answer": "x\u2028y"}
    write_jsonl(tmp_path / "train.jsonl", [json.dumps(row, ensure_ascii=False)] * 2)
    loaded = load_examples(config(source="jsonl", path=str(tmp_path)))
    assert [(one.prompt, one.reference) for one in loaded.examples] == [tuple(row.values())] * 2


def rows(count, start=0):
    numbers = range(start, start + count)
    return [{"prompt": f"{i}+1=?", "answer": str(i + 1), "level": i} for i in numbers]


def load_rows(folder: Path, some, **data):
    """What becomes of these rows in rows.jsonl."""
    return load_examples(config(source=str(write_jsonl(folder / "rows.jsonl", some)), **data))


def prompts_of(loaded):
    return [example.prompt for example in loaded.examples]


# ---- MATH and GSM8K

MATH = config(source="math", path=str(SAMPLES / "math_test.jsonl"))


def test_math_takes_its_five_subjects_and_says_the_true_count():
    train, held_out = load_examples(MATH), load_examples(MATH, "heldout")
    subjects = {example.info["type"] for example in (*train.examples, *held_out.examples)}
    assert subjects == set(MATH_SUBJECTS.values())
    assert len(train.examples) + len(held_out.examples) == 14
    assert f"{len(train.examples)} of the copy's 20 problems" in train.notes[0]


def test_a_copy_with_one_split_holds_out_a_part_that_is_never_trained_on_and_says_so():
    train, held_out = load_examples(MATH), load_examples(MATH, "heldout")
    assert not set(prompts_of(train)) & set(prompts_of(held_out))
    assert any("one problem in 10" in note and "never trains on it" in note for note in train.notes)


def test_math_references_are_the_last_box_of_the_solution():
    for example in load_examples(MATH).examples:
        assert f"boxed{{{example.reference}}}" in example.info["solution"]


def test_a_math_solution_without_a_balanced_box_is_dropped_and_named(tmp_path):
    row = {"problem": "p", "type": "Geometry", "level": "Level 1"}
    solutions = [r"so \boxed{4}", "no box", r"open \boxed{4", r"\boxed{}"]
    path = write_jsonl(
        tmp_path / "train.jsonl",
        [row | {"problem": f"p{i}", "solution": text} for i, text in enumerate(solutions)],
    )
    write_jsonl(tmp_path / "test.jsonl", [row | {"solution": r"\boxed{1}"}])
    loaded = load_examples(config(source="math", path=str(path.parent)))
    assert [example.reference for example in loaded.examples] == ["4"]
    assert loaded.dropped == {"without an answer": 3}
    assert "Dropped rows: 3 without an answer (first: train.jsonl line 2)" in loaded.notes


def test_gsm8k_references_stand_behind_the_mark_without_thousands_separators():
    folder = config(source="gsm8k", path=str(SAMPLES))
    train, held_out = load_examples(folder), load_examples(folder, "heldout")
    assert [example.reference for example in train.examples][-2:] == ["1080", "850000"]
    found = [int(example.reference) for example in held_out.examples]
    assert found == [18, 3, 70000, 540, 2125, 114200] and len(train.examples) == 14


@pytest.mark.parametrize(("source", "count"), [("math", 20), ("gsm8k", 6)])
def test_data_sets_that_share_a_folder_are_told_apart_by_their_names(source, count):
    train, heldout = find_files(SAMPLES, "path", prefer=source)
    held_out = load_examples(config(source=source, path=str(SAMPLES)), "heldout")
    assert all(source in file.name for file in (*train, *heldout))
    assert sum(1 for file in heldout or train for _ in file.open()) == count
    assert not held_out.dropped


def test_a_gsm8k_answer_without_the_mark_is_dropped(tmp_path):
    good = {"question": "q", "answer": "1\n#### -1,000,000"}
    path = write_jsonl(
        tmp_path / "train.jsonl",
        [good, {"question": "r", "answer": "no mark"}, {"question": "s", "answer": "#### "}],
    )
    write_jsonl(tmp_path / "test.jsonl", [good])
    loaded = load_examples(config(source="gsm8k", path=str(path.parent)))
    assert [example.reference for example in loaded.examples] == ["-1000000"]
    assert loaded.dropped == {"without an answer": 2}


# ---- files


@pytest.mark.parametrize("named_by", ["source", "path"])
def test_a_file_has_columns_for_prompt_and_answer_and_the_rest_is_info(tmp_path, named_by):
    row = {"question": "1+1=?", "gold": 2, "task": "sums", "level": 3}
    path = str(write_jsonl(tmp_path / "sums.jsonl", [row]))
    where = {"source": path} if named_by == "source" else {"source": "jsonl", "path": path}
    loaded = load_examples(config(prompt_column="question", answer_column="gold", **where))
    assert loaded.examples == [Example("1+1=?", "2", "sums", {"level": 3}, "sums-0")]


def test_a_prompt_can_be_a_conversation(tmp_path):
    talk = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1=?", "name": "me", "weight": 1, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
    ]
    path = write_jsonl(tmp_path / "talk.jsonl", [{"prompt": talk, "answer": "2"}])
    (example,) = load_examples(config(source=str(path))).examples
    assert example.prompt == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1=?", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
    ]


BAD_ROWS = {
    "no prompt": {"answer": "1"},
    "an empty prompt": {"prompt": " ", "answer": "1"},
    "a number as prompt": {"prompt": 5, "answer": "1"},
    "a message without content": {"prompt": [{"role": "user"}], "answer": "1"},
    "calls beside content in parts": {
        "prompt": [{"role": "assistant", "content": [{"text": "a"}], "tool_calls": [{}]}],
        "answer": "1",
    },
    "an empty conversation": {"prompt": [], "answer": "1"},
    "a list as answer": {"prompt": "x", "answer": ["1"]},
    "a truth value as answer": {"prompt": "x", "answer": True},
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_malformed_row_is_counted_and_named_and_not_fatal(tmp_path, bad):
    loaded = load_rows(tmp_path, [rows(1)[0], BAD_ROWS[bad], rows(1, 5)[0]])
    assert [example.example_id for example in loaded.examples] == ["rows-0", "rows-2"]
    assert loaded.dropped == {"malformed": 1}
    assert "Dropped rows: 1 malformed (rows.jsonl line 2)" in loaded.notes


NO_OBJECT, SURROGATE = "not a JSON object", "with an unpaired surrogate"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "x", ', NO_OBJECT),
        (b"[1, 2]", NO_OBJECT),
        (b'{"prompt": "\xff", "answer": "1"}', NO_OBJECT),
        (b'{"prompt": "\\ud83d", "answer": "1"}', SURROGATE),
        (b'{"prompt": [{"role": "user", "content": "\\ud83d"}], "answer": "1"}', SURROGATE),
        (b'{"prompt": "x", "answer": "\\udc00"}', SURROGATE),
    ],
)
def test_a_line_that_holds_no_text_for_an_example_is_counted_by_its_reason(tmp_path, line, reason):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "1+1=?", "answer": "2"}\n' + line + b"\n")
    loaded = load_examples(config(source=str(path)))
    assert prompts_of(loaded) == ["1+1=?"] and loaded.dropped == {reason: 1}


def test_a_key_that_a_row_gives_twice_is_said(tmp_path):
    lines = ['{"answer": "1", "prompt": "x", "answer": "2"}', *rows(2)]
    loaded = load_examples(config(source=str(write_jsonl(tmp_path / "rows.jsonl", lines))))
    assert loaded.examples[0].reference == "2"
    assert loaded.notes[0].endswith("1 (first: rows.jsonl line 1, answer)")


@pytest.mark.parametrize(
    "text",
    [
        "prompt,answer\n1+1=?,2\n",
        '[{"prompt": "1+1=?", "answer": "2"}]',
        '[\n  {\n    "prompt": "x"\n  }\n]\n',
    ],
)
def test_csv_and_a_json_list_are_answered_with_the_form_that_is_read(tmp_path, text):
    (tmp_path / "rows.csv").write_text(text)
    told = r"not a JSON object \(.*line 1\); convert it: .* one JSON object per line"
    with pytest.raises(ConfigurationError, match=told):
        load_examples(config(source=str(tmp_path / "rows.csv")))


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        *(("137.0", "137"), ("-0.0", "0"), ("1e16", "1" + "0" * 16), ("1e-07", "0.0000001")),
        *(("2.50", "2.5"), ("1125899906842624.0", "1125899906842624"), ('"137.0"', "137.0")),
        ("3.0517578125e-05", "0.000030517578125"),
        *((text, text) for text in ("0.30000000000000004", "1" * 31, "1" * 5000)),
    ],
)
def test_a_number_as_answer_is_written_as_a_person_writes_it(tmp_path, answer, reference):
    (example,) = load_rows(tmp_path, [f'{{"prompt": "x", "answer": {answer}}}']).examples
    assert example.reference == reference


def test_the_numbers_of_a_parquet_column_are_written_as_those_of_a_file(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    for type_, answers in (
        (pyarrow.float64(), [137.0, None, float("nan"), 0.1]),
        (pyarrow.float16(), [137.0, None, float("nan"), 0.1]),
        (pyarrow.float32(), [137.0, None, float("inf"), 0.1]),
        (pyarrow.decimal128(5, 2), [Decimal("137.00"), None, None, Decimal("0.10")]),
    ):
        columns = {"prompt": ["x"] * 4, "answer": pyarrow.array(answers, type_)}
        parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
        loaded = load_examples(config(source=str(tmp_path / "rows.parquet")))
        assert [example.reference for example in loaded.examples] == ["137", "0.1"], type_
        assert loaded.dropped == {"without an answer": 2}


def test_an_answer_inside_a_column_is_named_with_a_dot(tmp_path):
    row = {"prompt": "x", "reward_model": {"style": "rule", "ground_truth": 4.0}}
    path = write_jsonl(tmp_path / "rows.jsonl", [row, row | {"reward_model": None}])
    told = r'set \[data\] answer_column = "reward_model\.ground_truth"\.'
    with pytest.raises(ConfigurationError, match=told):
        load_examples(config(source=str(path)))
    nested = config(source=str(path), answer_column="reward_model.ground_truth")
    loaded = load_examples(nested)
    assert [example.reference for example in loaded.examples] == ["4"]
    assert loaded.dropped == {"without an answer": 1}
    said = [{"role": "user", "content": "x"}]
    table = {"prompt": json.dumps(said), "reward_model": json.dumps(row["reward_model"])}
    write_jsonl(path, [table])  # as JSON text
    assert (load_examples(nested).examples[0].prompt, loaded.examples[0].reference) == (said, "4")
    with pytest.raises(ConfigurationError, match=r"answer_column = \"reward_model\.ground_truth"):
        load_examples(config(source=str(path)))
    write_jsonl(path, [row | {"reward_model.ground_truth": "whole"}])
    assert load_examples(nested).examples[0].reference == "whole"


@pytest.mark.parametrize("answer", [None, "", "  \n", float("nan"), float("-inf")])
def test_an_empty_answer_is_counted_and_never_a_reference(tmp_path, answer):
    loaded = load_rows(tmp_path, [*rows(2), {"prompt": "x", "answer": answer}])
    assert loaded.dropped == {"without an answer": 1}
    assert all(example.reference for example in loaded.examples)


def test_a_set_left_empty_is_fatal_and_says_why_and_which_columns_there_are(tmp_path):
    said = (
        r"has no usable training row: 3 malformed \(first: rows\.jsonl line 1\); its columns are"
        r' question, gold; set \[data\] prompt_column = "question" and answer_column = "gold"\.'
    )
    with pytest.raises(ConfigurationError, match=said):
        load_rows(tmp_path, [{"question": "x", "gold": "1"}] * 3)


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(  # the third line begins a second file that was joined to it
        b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\n\n\xef\xbb\xbf{"prompt": "b", "answer": "2"}'
    )
    loaded = load_examples(config(source=str(path)))
    assert prompts_of(loaded) == ["a", "b"]
    assert not loaded.dropped


def test_parquet_is_read_like_jsonl(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    write_jsonl(tmp_path / "a" / "rows.jsonl", rows(5))
    parquet.write_table(pyarrow.Table.from_pylist(rows(5)), tmp_path / "rows.parquet")
    one, other = (load_examples(config(source=str(tmp_path / at))) for at in ("rows.parquet", "a"))
    assert one.examples == other.examples
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    told = r"not a readable parquet file \(.*[^.]\); write it again"
    with pytest.raises(ConfigurationError, match=told):
        load_examples(config(source=str(tmp_path / "torn.parquet")))


HELD_OUT = ("test", "test-00000-of-00001", "heldout", "held_out", "validation", "test/0")


@pytest.mark.parametrize("held_out", HELD_OUT)
def test_a_folders_files_say_by_name_what_is_held_out(tmp_path, held_out):
    write_jsonl(tmp_path / "train-a.jsonl", rows(2))
    write_jsonl(tmp_path / "train-b.jsonl", rows(2, 2))
    write_jsonl(tmp_path / f"{held_out}.jsonl", rows(3, 10))
    folder = config(source=str(tmp_path))
    assert prompts_of(load_examples(folder)) == [row["prompt"] for row in rows(4)]
    assert prompts_of(load_examples(folder, "heldout")) == [row["prompt"] for row in rows(3, 10)]


def test_test_files_go_before_validation_files(tmp_path):
    for name in ("train", "validation", "test"):
        write_jsonl(tmp_path / f"{name}.jsonl", rows(1))
    assert [file.name for file in find_files(tmp_path, "path")[1]] == ["test.jsonl"]


@pytest.mark.parametrize("file", ["project/retrain.toml", "run/config.toml"])
def test_a_path_stands_relative_to_the_file_and_to_where_its_run_began(tmp_path, monkeypatch, file):
    write_jsonl(tmp_path / "project" / "rows.jsonl", rows(2))
    write_jsonl(tmp_path / "run" / "rows.jsonl", rows(1))  # a record of the run
    damaged = [None, 3, "\0", "\ud800", "x" * 300, [], str(tmp_path / "gone")]
    folders = {"folders": [*damaged, str(tmp_path / "project")]}
    environment = write_jsonl(tmp_path / "run" / "environment.json", [folders])
    (tmp_path / file).write_text('[data]\nsource = "rows.jsonl"\n')
    monkeypatch.chdir(tmp_path)
    loaded = load_config(tmp_path / file)
    assert len(load_examples(loaded).examples) == 2
    for folders in (None, 3, "/", {"/": 1}, [None]):
        write_jsonl(environment, [{"folders": folders}])
        assert {*loaded.search_folders} == {*loaded.own_folders}


@pytest.mark.parametrize(
    ("files", "name", "sentence"),
    [
        ((), "nothing.jsonl", r"does not exist"),
        ((), "", r"holds no \.jsonl or \.parquet file"),
        (("a.jsonl", "b.parquet"), "", "holds both"),
    ],
)
def test_a_path_without_data_is_one_sentence_that_names_the_key(tmp_path, files, name, sentence):
    for file in files:
        (tmp_path / file).touch()
    path = tmp_path / name
    with pytest.raises(ConfigurationError, match=sentence) as failure:
        load_examples(config(source=str(path)))
    assert f'[data] source = "{path}"' in str(failure.value)


# ---- held-out data


def test_a_source_without_a_held_out_split_is_refused_when_evaluation_needs_one(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", rows(3))
    with pytest.raises(NoHeldOutSplit, match="name other problems"):
        load_examples(config(source=str(path)), "heldout")


def test_an_evaluation_source_replaces_the_held_out_split_and_is_used_whole(tmp_path):
    train = write_jsonl(tmp_path / "rows.jsonl", rows(3))
    other = write_jsonl(tmp_path / "other.jsonl", rows(4, 50))
    both = config(source="jsonl", path=str(train), evaluation={"source": str(other)})
    assert len(load_examples(both).examples) == 3
    held_out = load_examples(both, "heldout")
    assert prompts_of(held_out) == [row["prompt"] for row in rows(4, 50)]
    assert held_out.data.source == str(other)


def test_a_problem_on_both_sides_is_said():
    talk = [{"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": "4"}]
    held_out = [Example("3+3=?", "6", example_id="h0"), Example("2+2=? ", "4", example_id="h1")]
    for same in ("2+2=?", talk):
        train = [Example("1+1=?", "2"), Example(same, "4")]
        assert contamination_note(train, held_out) == (
            "Held-out problems that are in training too: 1, the first is h1. Held-out accuracy is"
            " too high."
        )
        assert contamination_note(train, held_out[:1]) is None


def test_the_labs_sides_share_no_problem():
    sides = (load_examples(config(source="lab"), side).examples for side in ("train", "heldout"))
    assert contamination_note(*sides) is None


# ---- max_examples


def test_max_examples_takes_a_fixed_subset_spread_over_the_set(tmp_path):
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows(200)))
    few, more = (
        set(prompts_of(load_examples(config(source=path, max_examples=count))))
        for count in (20, 60)
    )
    assert len(few) == 20 and few < more
    levels = sorted(int(prompt.partition("+")[0]) for prompt in few)
    assert levels[0] < 60 and levels[-1] >= 140


# ---- Python code


def test_a_registered_source_is_called_with_its_params(tmp_path):
    register_source("tens", lambda count: [Example(f"{i}*10=?", str(10 * i)) for i in range(count)])
    loaded = load_examples(config(source="tens", params={"count": 3}))
    assert loaded.examples[2] == Example("2*10=?", "20", example_id="tens-2")
    with pytest.raises(ConfigurationError, match="does not take"):
        load_examples(config(source="tens", params={"size": 3}))
    with pytest.raises(NoHeldOutSplit):
        load_examples(config(source="tens", params={"count": 3}), "heldout")
    with pytest.raises(ValueError, match="exists already"):
        register_source("tens", list)
    with pytest.raises(ValueError, match="exists already"):
        register_source("math", list)


def test_a_limit_above_the_bound_of_a_stream_hears_the_bound(monkeypatch):
    monkeypatch.setattr("retrain.data.sources.MAX_STREAMED", 5)
    register_source("endless", lambda: map(Example, repeat("1+1=?"), repeat("2")))
    assert len(load_examples(config(source="endless", max_examples=5)).examples) == 5
    with pytest.raises(ConfigurationError, match=r"set .training. max_examples to 5 or less, or"):
        load_examples(config(source="endless", max_examples=6))


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "my_data.py").write_text(
        textwrap.dedent("""
            from retrain.data import Example
            def both(start=0, split="train"):
                return [Example(f"{split} {start}", "1", example_id="x")] * (2 if split == "train" else 1)
            def holes():
                yield Example("good", "1")
                yield Example("no answer", "")
                yield Example("a number", 5)
                yield Example("", "1")
            def strings():
                return ["not an example"]
            def broken():
                raise KeyError("gone")
            """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield
    sys.modules.pop("my_data", None)


def test_a_plugin_with_a_split_has_held_out_examples_of_its_own(plugin):
    both = config(source="my_data.both", params={"start": 7})
    assert prompts_of(load_examples(both)) == ["train 7", "train 7"]
    assert prompts_of(load_examples(both, "heldout")) == ["heldout 7"]


def test_an_id_that_occurs_twice_is_said(plugin):
    notes = load_examples(config(source="my_data.both")).notes
    assert any("Examples that share their example_id" in note for note in notes)


def test_what_a_plugin_leaves_out_is_dropped_like_a_row(plugin):
    loaded = load_examples(config(source="my_data.holes"))
    assert prompts_of(loaded) == ["good"]
    assert loaded.dropped == {"without an answer": 1, "malformed": 2}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("strings", "gave a str instead of"),
        ("broken", "failed with KeyError"),
        ("absent", "does not load"),
    ],
)
def test_a_plugins_mistake_is_one_sentence(plugin, name, sentence):
    with pytest.raises(ConfigurationError, match=sentence) as failure:
        load_examples(config(source=f"my_data.{name}"))
    assert f'[data] source = "my_data.{name}"' in str(failure.value)


# ---- the hub


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hub:openai/gsm8k", HubData("openai/gsm8k")),
        ("hub:openai/gsm8k:main", HubData("openai/gsm8k", "main")),
        ("hub:openai/gsm8k:main:test", HubData("openai/gsm8k", "main", "test")),
        ("hub:squad:validation", HubData("squad", "", "validation")),
        ("hub:squad::train[:10%]", None),
        ("hub:squad::extra", HubData("squad", "", "extra")),
        ("hub::main", None),
    ],
)
def test_hub_names_have_a_configuration_and_a_split(source, expected):
    if expected is None:
        with pytest.raises(ConfigurationError, match=r"hub:NAME\[:config\]\[:split\]"):
            HubData.parse(source)
    else:
        assert HubData.parse(source) == expected


HUB = """
import sys
from retrain.config import TrainConfig
from retrain.data import load_examples
from retrain.errors import RetrainError
for source in sys.argv[1:]:
    for split in ("train", "heldout"):
        try:
            loaded = load_examples(TrainConfig.model_validate({"data": {"source": source}}), split)
            print(split, [example.example_id for example in loaded.examples])
        except RetrainError as failure:
            print(split, type(failure).__name__, failure)
"""


@pytest.mark.slow
def test_without_a_network_a_hub_set_is_one_sentence_and_a_local_one_works(tmp_path):
    """The hub's own library resolves a folder first, so a copy under the same name goes through the
    same code without a network.
    """
    write_jsonl(tmp_path / "nobody" / "sums" / "train.jsonl", rows(2))
    write_jsonl(tmp_path / "nobody" / "sums" / "validation.jsonl", rows(1, 5))
    places = {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "cache")}
    environment = os.environ | places | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    # Another test of this process may have found no hub and gone offline.
    environment.pop("HF_HUB_OFFLINE", None)
    sources = ["hub:nobody/sums", "hub:nobody/sums::validation", "hub:nobody/absent", "math"]
    command = [sys.executable, "-c", HUB, *sources]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "train ['sums-train-0', 'sums-train-1']",
        "heldout ['sums-validation-0']",
        "train ['sums-validation-0']",
    ]
    assert lines[3].startswith("heldout NoHeldOutSplit")
    for line in lines[4:]:
        assert "EnvironmentFailure" in line
        assert "did not answer within 5 s. Offline, set [data] path to a local copy" in line


def test_a_pipe_is_told_which_source_takes_so_long(tmp_path, monkeypatch, capsys):
    """It may hang, and the run would say no more than that it loads."""
    import time

    from retrain.tracking import console
    from tests.runs import small, small_run

    def slow():
        time.sleep(0.3)
        return [Example(f"{at}+1=", str(at + 1)) for at in range(9)]

    register_source("slow", slow)
    own = small(tmp_path / "run", data={"source": "slow"}, training={"max_steps": 1})
    said = 'Still at: Reading and encoding [data] source = "slow"'
    for seconds, is_told in ((30.0, False), (0.05, True)):
        monkeypatch.setattr(console, "REMINDER_S", seconds)
        small_run(own, overwrite=True)
        assert (said in capsys.readouterr().err) == is_told
    held_out = {"evaluation.source": "slow", "evaluation.at_end": True, "data.source": "lab"}
    small_run(replaced(own, held_out), overwrite=True)
    assert said.replace("[data]", "[evaluation]") in capsys.readouterr().err
