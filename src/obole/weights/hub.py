"""A model's name -> the file or folder that holds it: a path, the catalogue, or a repository of the Hugging Face hub."""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path

from obole.errors import ModelError
from obole.weights.catalogue import CATALOGUE, CatalogueEntry
from obole.weights.safetensors import INDEX, SINGLE
from obole.weights.sources import Progress, quiet_bars, short, watching
from obole.weights.store import cached_path, obtain

__all__ = ["CATALOGUE", "CatalogueEntry", "Progress", "holds_model", "list_models", "resolve"]

REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+)(?::(.+\.gguf))?", re.ASCII | re.IGNORECASE)
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
FOLDER_FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    INDEX,
}


def resolve(model: str | os.PathLike[str], revision: str | None = None, progress: Progress | None = None) -> Path:
    """Find `model` and bring it onto this machine if need be.

    In this order: a name of the catalogue; a `.gguf` file, or a folder that holds a model; `owner/name` on the Hugging
    Face hub, or `owner/name:file.gguf` where there are several. `revision`: branch, tag or commit, for the hub only.
    Raises `ModelError`, saying what was tried.
    """
    model = os.fspath(model)
    if model in CATALOGUE:
        _refuse_revision(model, revision)
        return obtain(CATALOGUE[model], progress)
    path = Path(model).expanduser()
    if model and path.exists():
        _refuse_revision(model, revision)
        return _pick_local(path)
    match = REPOSITORY.fullmatch(model)
    if match is None or model.startswith((".", "~")) or (match[2] is None and model.lower().endswith(".gguf")):
        raise ModelError(_not_found(model))
    return _from_hub(match[1], match[2], revision, progress)


def list_models() -> list[tuple[CatalogueEntry, Path | None, int]]:
    """The catalogue: each entry, where its file is cached (None: not), and its bytes (0: not known before it is)."""
    found = ((entry, cached_path(entry)) for entry in CATALOGUE.values())
    return [(entry, path, path.stat().st_size if path else entry.size or 0) for entry, path in found]


def holds_model(folder: Path) -> bool:
    """Whether a folder has the files of a model, of whatever kind and however many."""
    try:
        return any(child.name == "config.json" or child.suffix.lower() == ".gguf" for child in folder.iterdir())
    except OSError:  # not ours to read
        return False


def choose_files(names: Mapping[str, int | None], wanted: str | None, where: str, mark: str = ":") -> tuple[str, ...]:
    """Which files of a repository or folder make up the model: one GGUF file, or safetensors with what belongs to them.

    `mark` stands between `where` and the name of a file in it. Raises `ModelError` if `wanted` is not there, if there are
    several GGUF files and none is wanted, or nothing at all.
    """
    ggufs = sorted(name for name in names if name.lower().endswith(".gguf") and "mmproj" not in name.lower())
    if wanted is not None:
        if wanted not in ggufs:
            raise ModelError(f"{where} has no file {wanted!r}; it has {', '.join(ggufs) or 'no GGUF files'}.")
        return (wanted,)
    if "config.json" in names and (SINGLE in names or INDEX in names):
        return tuple(sorted(name for name in names if name in FOLDER_FILES or WEIGHTS.fullmatch(name)))
    if len(ggufs) == 1:
        return (ggufs[0],)
    if ggufs:
        raise ModelError(f"{where} has several GGUF files: say which, as in {where}{mark}{ggufs[0]} ({', '.join(ggufs)}).")
    raise ModelError(f"{where} has neither a GGUF file nor config.json with safetensors, so there is no model to load.")


def _pick_local(path: Path) -> Path:
    if not path.is_dir() or (path / "config.json").exists():
        return path
    files = choose_files({child.name: None for child in path.iterdir()}, None, str(path), os.sep)
    if len(files) == 1 and files[0].lower().endswith(".gguf"):
        return path / files[0]
    return path


def _refuse_revision(model: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelError(f"A revision ({revision!r}) can only be given for a repository of the hub, which {model!r} is not.")


def _not_found(model: str) -> str:
    close = difflib.get_close_matches(model.lower(), CATALOGUE, 1, 0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return (
        f"There is no model {model!r}: it is no file or folder, no name in the catalogue, and no repository id (owner/name); "
        f"{hint}`obole models` lists the catalogue."
    )


def _from_hub(repo: str, wanted: str | None, revision: str | None, progress: Progress | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    lost = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError)  # GatedRepoError is one
    at = f" at revision {revision!r}" if revision else ""
    try:
        info = huggingface_hub.HfApi().model_info(repo, revision=revision, files_metadata=True)
    except lost as error:
        raise ModelError(
            f"{repo}{at} is no file or folder here, and the Hugging Face hub does not give it ({short(error)}); "
            "`obole models` lists the catalogue."
        ) from None
    except Exception as error:  # no network, or no service: the library's, its HTTP client's or the system's errors
        return _from_hub_cache(repo, wanted, revision, short(error))
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or ()}
    files = choose_files(sizes, wanted, repo)
    total = sum(sizes[name] or 0 for name in files)
    blobs = Path(huggingface_hub.constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    try:
        with watching(blobs, "downloading", total, progress), quiet_bars(progress is not None):
            patterns = [glob.escape(name) for name in files]
            folder = Path(huggingface_hub.snapshot_download(repo, revision=info.sha, allow_patterns=patterns))
    except Exception as error:
        raise ModelError(f"{repo}{at} could not be fetched from the Hugging Face hub ({short(error)}).") from error
    for name in files:
        found = (folder / name).stat().st_size if (folder / name).exists() else 0
        if sizes[name] not in (None, found):
            raise ModelError(f"{folder / name}: the hub has {sizes[name]} bytes, but {found} arrived; delete it and try again.")
    return _local(folder, files)


def _from_hub_cache(repo: str, wanted: str | None, revision: str | None, reason: str) -> Path:
    """Without the hub, what was fetched from it before will do."""
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True))
    except Exception:
        raise ModelError(
            f"{repo} is no file or folder here, the Hugging Face hub cannot be reached ({reason}), and it was not fetched "
            "before; `obole models` lists the catalogue."
        ) from None
    names = {str(path.relative_to(folder)): None for path in folder.rglob("*") if path.is_file()}
    return _local(folder, choose_files(names, wanted, repo))


def _local(folder: Path, files: tuple[str, ...]) -> Path:
    return folder / files[0] if len(files) == 1 and files[0].lower().endswith(".gguf") else folder
