"""`obole distill`: teach a model to predict several tokens in one pass."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from obole.cli.answering import open_engine
from obole.cli.distill_screen import screen, summary
from obole.cli.failures import guarded
from obole.cli.options import MODEL_HELP, JsonFlag, Revision, WrongUsage, usage
from obole.cli.signals import INTERRUPTED
from obole.cli.terminal import note, print_json, progress_bar
from obole.distill.recipe import LEAST_K, PRECISIONS, TARGETS, Limits, Objective, Pace, Recipe
from obole.errors import InvalidRequest, ModelError, OboleError

if TYPE_CHECKING:
    from obole.distill.data import Rows
    from obole.distill.parallel import World
    from obole.distill.training import Workplace
    from obole.text.templates import ChatTemplate
    from obole.text.tokenizer import Tokenizer
    from obole.weights.checkpoint import Checkpoint

RECIPE, PACE, LIMITS = Recipe(), Pace(), Limits()
DATA_PANEL, METHOD_PANEL, PACE_PANEL, MACHINE_PANEL = "Texts", "Method", "Optimiser and run", "Machine"


def option(panel: str, help_: str, *names: str, **rest: Any) -> Any:
    return typer.Option(*names, help=help_, rich_help_panel=panel, **rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that the command line says."""

    model: str
    revision: str | None
    out: Path
    data: Path | None
    tokens: int | None  # to be written by the model itself
    prompts: Path | None
    text_length: int | None
    temperature: float
    recipe: Recipe
    pace: Pace
    limits: Limits
    resume: bool
    always_export: bool
    tensorboard: bool
    shard: bool
    threads: int | None
    dtype: str


@guarded
def distill(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the model; OUT.training is kept beside it.")],
    data: Annotated[
        Path | None,
        option(
            DATA_PANEL,
            'Texts: paragraphs, or .jsonl with {"text"}, {"prompt", "completion"} or {"messages"} on a line.',
            metavar="FILE",
        ),
    ] = None,
    self_generate: Annotated[
        int | None, option(DATA_PANEL, "Train on this many tokens that the model writes itself.", min=1, metavar="N")
    ] = None,
    prompts: Annotated[
        Path | None, option(DATA_PANEL, "What it goes on from, in the same formats.", metavar="FILE", show_default="nothing")
    ] = None,
    text_length: Annotated[
        int | None,
        option(
            DATA_PANEL, "Tokens of a text that it writes, at most, with its prompt.", min=2, metavar="N", show_default="--slots"
        ),
    ] = None,
    temperature: Annotated[float, option(DATA_PANEL, "Spread of its choices.", min=0.0, metavar="X")] = 1.0,
    k_max: Annotated[
        int, option(METHOD_PANEL, "Tokens to predict in one pass, at most.", min=LEAST_K, metavar="N")
    ] = RECIPE.k_max,
    slots: Annotated[int, option(METHOD_PANEL, "Tokens and masks in a row.", min=1, metavar="N")] = RECIPE.slots,
    regions: Annotated[int, option(METHOD_PANEL, "Places in a row that predict.", min=1, metavar="N")] = RECIPE.regions,
    loss: Annotated[
        str,
        option(
            METHOD_PANEL,
            "Targets: hard (what the teacher finds likeliest after the student's words), soft (its probabilities) or truth "
            "(the text itself).",
            metavar="|".join(TARGETS),
        ),
    ] = RECIPE.objective.targets,
    truth_steps: Annotated[
        int, option(METHOD_PANEL, "First steps that teach the text itself, whatever the loss.", min=0, metavar="N")
    ] = RECIPE.objective.truth_steps,
    prefix_loss: Annotated[float, option(METHOD_PANEL, "Weight of the next-token loss on the text.", metavar="W")] = 0.0,
    entropy: Annotated[float, option(METHOD_PANEL, "Weight of the predictions' entropy; above 0 sharpens.", metavar="W")] = 0.0,
    lora: Annotated[
        int,
        option(METHOD_PANEL, "Train adapters of this rank, on at masks alone; 0: all weights.", min=0, metavar="RANK"),
    ] = RECIPE.lora,
    seed: Annotated[int, option(METHOD_PANEL, "The same seed gives the same training.", min=0, metavar="N")] = RECIPE.seed,
    batch: Annotated[int, option(PACE_PANEL, "Rows of a step.", min=1, metavar="N")] = RECIPE.batch,
    steps: Annotated[
        int, option(PACE_PANEL, "Steps in all, those before --resume included.", min=0, metavar="N")
    ] = LIMITS.steps,
    minutes: Annotated[
        float | None,
        option(PACE_PANEL, "End this run after so long.", min=0.0, metavar="M", show_default="when the steps are done"),
    ] = None,
    learning_rate: Annotated[
        float, option(PACE_PANEL, "Learning rate after the warm-up.", "--lr", metavar="X")
    ] = PACE.learning_rate,
    warmup: Annotated[int, option(PACE_PANEL, "Steps in which it rises.", min=0, metavar="N")] = PACE.warmup,
    weight_decay: Annotated[float, option(PACE_PANEL, "Of AdamW, on matrices.", metavar="X")] = PACE.weight_decay,
    clip: Annotated[float, option(PACE_PANEL, "Norm of the gradient at most.", metavar="X")] = PACE.clip,
    save_every: Annotated[int, option(PACE_PANEL, "Steps between saved states.", min=1, metavar="N")] = LIMITS.save_every,
    resume: Annotated[bool, option(PACE_PANEL, "Go on from the saved state.", "--resume")] = False,
    always_export: Annotated[bool, option(PACE_PANEL, "Write the model also when interrupted.", "--always-export")] = False,
    tensorboard: Annotated[bool, option(PACE_PANEL, "Curves for TensorBoard in OUT.training.", "--tensorboard")] = False,
    micro_batch: Annotated[
        int, option(MACHINE_PANEL, "Rows computed at once by one process.", min=1, metavar="N")
    ] = PACE.micro_batch,
    checkpointing: Annotated[
        bool, option(MACHINE_PANEL, "Less memory, a third more time: activations are computed twice.", "--checkpointing")
    ] = PACE.checkpointing,
    precision: Annotated[
        str, option(MACHINE_PANEL, "Of products; auto: bfloat16 where the hardware has it.", metavar="|".join(PRECISIONS))
    ] = PACE.precision,
    shard: Annotated[
        bool, option(MACHINE_PANEL, "With torchrun: each process keeps a part of the weights (FSDP).", "--shard")
    ] = False,
    threads: Annotated[
        int | None, option(MACHINE_PANEL, "Processor threads.", min=1, metavar="N", show_default="the processors at hand")
    ] = None,
    dtype: Annotated[
        str,
        option(MACHINE_PANEL, "Of the weights in OUT; auto: bfloat16, with --lora float32.", metavar="|".join(PRECISIONS)),
    ] = "auto",
    as_json: JsonFlag = False,
    revision: Revision = None,
) -> None:
    """Teach a model to predict several tokens in one pass, by self-distillation; nothing but one token is added to it.

    The model stays one that any engine can load. Interrupted (Ctrl-C, SIGTERM), it saves its state; the same command with
    --resume goes on as if nothing had happened. On several GPUs: torchrun --nproc-per-node N $(command -v obole) distill ...
    """
    if (data is None) == (self_generate is None):
        raise WrongUsage("data", "Give the texts to train on: either --data FILE or --self-generate N.")
    if out.name in ("", ".."):
        raise WrongUsage("out", f"OUT must name a folder, which {out} does not: give one that does not exist yet.")
    if dtype not in PRECISIONS:
        raise WrongUsage("dtype", f"--dtype must be one of {', '.join(PRECISIONS)}, not {dtype!r}.")
    with usage():
        objective = Objective(targets=loss, truth_steps=truth_steps, prefix=prefix_loss, entropy=entropy)
        recipe = Recipe(
            seed=seed, k_max=k_max, slots=slots, regions=regions, batch=batch, objective=objective, lora=lora
        )  # fmt: skip
        pace = Pace(
            learning_rate=learning_rate, warmup=warmup, weight_decay=weight_decay, clip=clip, micro_batch=micro_batch,
            precision=precision, checkpointing=checkpointing,
        )  # fmt: skip
        limits = Limits(steps=steps, minutes=minutes, save_every=save_every)
    job = Job(
        model=model, revision=revision, out=out, data=data, tokens=self_generate, prompts=prompts, text_length=text_length,
        temperature=temperature, recipe=recipe, pace=pace, limits=limits, resume=resume, always_export=always_export,
        tensorboard=tensorboard, shard=shard, threads=threads, dtype=dtype,
    )  # fmt: skip
    carry_out(job, as_json=as_json)


def carry_out(job: Job, *, as_json: bool) -> None:
    """Train, export and report."""
    from obole.distill.parallel import join
    from obole.distill.training import STOPPED, Workplace

    with join(shard=job.shard) as world:
        place = Workplace(job.out.with_name(f"{job.out.name}.training"))
        if world.is_first:
            check_folders(job, place)
            try:
                place.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OboleError(f"{place.folder} cannot be made: {error.strerror}.") from None
        world.wait()
        document = train(job, world, place)
        if not world.is_first:
            return
        print_json(document) if as_json else print(summary(document))
    if document["ended"] == STOPPED:
        note(f"The state is saved. To go on: {resuming()}")
        raise typer.Exit(INTERRUPTED)


def check_folders(job: Job, place: Workplace) -> None:
    """Refuse to overwrite a training, and to resume none, before hours are spent."""
    begun = place.folder.is_dir() and any(place.folder.iterdir())
    if job.resume and not begun:
        raise InvalidRequest("resume", f"There is nothing to resume in {place.folder}: leave out --resume.")
    if not job.resume and begun:
        raise InvalidRequest("out", f"{place.folder} holds an earlier training: add --resume to go on, or remove it.")
    if not job.resume and job.out.exists() and (not job.out.is_dir() or any(job.out.iterdir())):
        raise InvalidRequest("out", f"{job.out} exists already: choose another folder, or remove it.")


def train(job: Job, world: World, place: Workplace) -> dict[str, Any]:
    """Everything from the model's files to the new ones; what --json prints."""
    from obole.distill.export import mask_id_of, text_files
    from obole.distill.training import STOPPED, export_state, facts, new_trainer, run, taken_up
    from obole.engine.assembly import load_text
    from obole.weights.checkpoint import open_checkpoint
    from obole.weights.hub import resolve

    checkpoint = open_checkpoint(resolve(job.model, job.revision))
    tokenizer, template = load_text(checkpoint)
    if tokenizer is None:
        raise ModelError(f"{job.model} has no tokenizer, and so no text to train on: add its tokenizer.json to the folder.")
    if checkpoint.adapter:
        raise ModelError(
            f"{job.model} has an adapter for its masks, which would be lost: begin with the model that it was made of, or go "
            "on with the training that made it (--resume)."
        )
    mask_id = mask_id_of(checkpoint, tokenizer)
    files = text_files(checkpoint, mask_id)  # now, since it finds out whether there is room for a mask
    rows = rows_of(job, world, place, checkpoint, tokenizer, template)
    about = facts(checkpoint, rows, job.recipe)
    state = taken_up(place, about)
    trainer = new_trainer(checkpoint, rows, mask_id, job.recipe, job.pace, world, state, job.threads)
    del state  # as large as the model and its optimiser
    with requests_to_stop() as asked, screen(job.limits, trainer.steps, world.is_first) as shown:
        ended = run(trainer, world, place, job.limits, about, board=job.tensorboard, stop=asked, show=shown.show)
    document = {
        "model": None,
        "state": str(place.folder),
        "ended": ended,
        "steps": trainer.steps,
        "slots": trainer.slots,
        "seconds": trainer.seconds,
        "rows": len(rows),
        "short": rows.short,
        "last": shown.means.values or None,
    }
    if world.is_first and (ended != STOPPED or job.always_export):
        export_state(place, checkpoint, mask_id, job.recipe, files, job.out, job.dtype)
        document["model"] = str(job.out)
    return document


def rows_of(
    job: Job,
    world: World,
    place: Workplace,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
) -> Rows:
    """What is trained on: a file's texts, or those that the model writes first. One process writes, all read."""
    from obole.distill.data import pack, read_prompts, read_texts
    from obole.distill.generate import Writing, opening, write_texts, written_texts

    end_id = tokenizer.eos_id if tokenizer.eos_id is not None else next(iter(checkpoint.config.eos_ids), None)
    recipe = job.recipe
    if job.data is not None:
        texts = read_texts(job.data, tokenizer, template, end_id)
    else:
        tokens = job.tokens or 0
        if world.is_first:
            begin = [opening(tokenizer, end_id)] if job.prompts is None else read_prompts(job.prompts, tokenizer, template)
            length = job.text_length or recipe.slots
            writing = Writing(tokens=tokens, length=length, temperature=job.temperature, seed=recipe.seed)
            settings = {"threads": job.threads, "max_context": length}
            with how_to_go_on(), open_engine(job.model, job.revision, settings) as engine, progress_bar() as report:
                write_texts(engine, checkpoint.digest.hex(), begin, writing, place.texts, partial(report, "writing texts"))
        world.wait()
        texts = written_texts(place.texts, tokens)
    return pack(texts, recipe.slots, recipe.slots // recipe.regions, end_id or 0)


@contextmanager
def requests_to_stop() -> Iterator[Callable[[], bool]]:
    """Within, SIGTERM and the first Ctrl-C are only noted, for the function yielded; a second Ctrl-C ends at once."""
    asked = False

    def on_signal(number: int, _frame: object) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    held = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in held.items():
        if handler is not signal.SIG_IGN:  # started in the background: Ctrl-C is for somebody else
            signal.signal(number, on_signal)
    try:
        yield lambda: asked
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)


@contextmanager
def how_to_go_on() -> Iterator[None]:
    """Say it where Ctrl-C ends what is under way."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"The texts written so far are kept. To go on: {resuming()}")
        raise


def resuming() -> str:
    """The command line that goes on where this one ends."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return shlex.join(words if "--resume" in words else [*words, "--resume"])
