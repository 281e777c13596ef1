"""The run around the loop, the same for every recipe. Its learning rate is begin/course.py, its end end.py.

    def train_here(run):
        source = run.open_data(...)                      # data
        loader = run.loader(source, transform)
        backbone, head = run.backbone(...), ...          # model
        return run.train(backbone, head, loader, [evaluation])

`partial_fc.recipe.start` calls it. A Config has flag groups launch, run, guards, exchange, optim and schedule.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from partial_fc import accessories, checkpoint, flags
from partial_fc.accessories import spare
from partial_fc.checkpoint.class_names import names_of
from partial_fc.comm.device import decoding_threads, meet
from partial_fc.data import Loader, Source, Synthetic, open_on_all
from partial_fc.data.build import Transform
from partial_fc.data.order import Order
from partial_fc.data.transform import channels_first
from partial_fc.evaluate.evaluation import Evaluation
from partial_fc.files import make_folders, replacing
from partial_fc.head import PartialFC
from partial_fc.models.inputs import InputContract
from partial_fc.optim import backbone as torch_optim
from partial_fc.optim.gradient_sync import broadcast_module
from partial_fc.train import end, head_from_flags, loop, resume
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.batch_norm import convert
from partial_fc.train.begin import course, start_centres
from partial_fc.train.begin.run_folder import hold_folders
from partial_fc.train.begin.start import is_asked_for, named
from partial_fc.train.context import Context
from partial_fc.train.job import Guards, Head, Hooks, Job, Outcome, RunState, Settings
from partial_fc.train.precision import Precision, choose
from partial_fc.train.record import header
from partial_fc.train.record.boards import open_wandb
from partial_fc.train.record.log import SecondFile, StepLine, open_files
from partial_fc.train.teacher import Teacher

S = TypeVar("S", bound=Source)


def run_recipe(
    recipe: str,
    config: Any,
    notes: Sequence[str],
    train_here: Callable[["Run"], int],
    bare: bool = False,
    hist: SecondFile | None = None,
    called: tuple[str | Path, str] | None = None,
) -> int:
    """Joins the other ranks, runs train_here, returns the exit status. bare: the terminal's lines have no prefix. hist:
    of the log, see `open_files`. called: data set and network, for a default --models-root."""
    asked, typed, config = is_asked_for(config), config, named(config, called)
    world, its_device = meet(config.launch)
    if workers := flags.flat(config).get("num_workers"):
        config = flags.replaced(config, {"num_workers": decoding_threads(workers, world)})
    accessories.begin_anew()
    folders, held = hold_folders(config, world)
    try:
        logger = open_files(config.run.models_root, world, bare, hist)
        run = Run(recipe, config, world, its_device, logger, folders, keeps_synthetic=asked)
        header.begin(run, typed)
        for note in (*held, *notes, *flags.notes(config, world.size)):
            run.note(note)
        with run.parts:
            return train_here(run) or 0
    finally:
        folders.release()


@dataclasses.dataclass
class Run(Context):
    """What a recipe builds a run from. keeps_synthetic: checkpoints and weights are written also of synthetic data."""

    keeps_synthetic: bool = True
    keeps: bool = True
    tables: list[tuple[flags.HeadFlags, PartialFC]] = field(default_factory=list)  # that `partial_fc` has made
    outcome: Outcome | None = None  # once it has trained
    parts: ExitStack = field(default_factory=ExitStack)  # closed when the recipe returns

    def lengths(self, order: Order) -> tuple[int, float]:
        """Returns (updates of the run, updates of its warm-up). Raises ValueError if the warm-up is longer, so recipes
        call this as soon as the data is open."""
        return course.lengths(self, order)

    # ---- data

    def open_data(self, opened: Callable[[], S]) -> S:
        """Returns what every rank opens, once all opened the same. Raises ValueError, on all ranks. A collective."""
        source = open_on_all(opened, self.world)
        if isinstance(source, Synthetic) and not self.keeps_synthetic:
            self.keeps = False
            self.note("the data is synthetic: no checkpoints or weights are written unless --models-root is given")
        return source  # type: ignore[return-value]

    def loader(self, source: Source, transform: Transform, order: Order | None = None, **more: Any) -> Loader:
        """Returns this rank's batches; `train` skips to the run's position. more: of Loader. Closed at the end."""
        optim, on_gpu, mode = self.config.optim, self.device.type == "cuda", self.config.run.loader
        return self.parts.enter_context(
            Loader(
                source,
                transform,
                order,
                batch_size=optim.batch_size,
                rank=self.world.rank,
                world_size=self.world.size,
                seed=self.config.run.seed,
                pin_memory=on_gpu,
                mode="process" if mode == "process" or (mode == "auto" and on_gpu) else "threads",
                keep=2 * optim.accumulate,  # of an update, and of a remote source's next one
                **more,
            )
        )

    # ---- start

    def saver(self) -> checkpoint.Saver:
        """Returns the writer of checkpoints below --checkpoint-dir. Closed at the end. A collective."""
        run = self.config.run
        lock = self.folders.fences.get(run.checkpoints)
        saver = checkpoint.Saver(run.checkpoints, self.world, run.keep_checkpoints, run.save_best, lock)
        return self.parts.enter_context(closing(saver))

    def backbone(
        self,
        module: nn.Module,
        to_input: InputContract,
        contract: Mapping[str, str],
        compile_for: Sequence[int] | None = None,
        **optimizer: Any,
    ) -> TorchBackbone:
        """Builds the backbone from a module by the shared flags: on this run's device, equal on all ranks. contract:
        see TorchBackbone. compile_for: the shape of a sample, to compile the training of the module for. optimizer: for
        `optim.backbone.build`; a module with no_weight_decay(), as timm's and our transformers have it, adds the
        parameters that it names, norms and biases to those without decay. A collective."""
        optim, world = self.config.optim, self.world
        if hasattr(module, "no_weight_decay"):
            no_decay: Any = module.no_weight_decay
            optimizer = {"decay_biases": False, "decay_norms": False, "no_decay": no_decay(), **optimizer}
        chosen = Precision(choose(optim.precision, self.device, world), self.device)
        module.to(self.device, chosen.parameter_dtype)
        if module.state_dict():
            broadcast_module(module, world)
        if optim.sync_bn:
            module = convert(module, world)
        make = partial(
            torch_optim.build, optim.optimizer, momentum=optim.momentum, weight_decay=optim.weight_decay, **optimizer
        )
        backbone = TorchBackbone(
            module, world, chosen, make, to_input, contract, self.config.run.seed,
            compression=self.config.exchange.gradient_compression,
        )  # fmt: skip
        self.logger.info(
            f"{contract['network']}: {sum(p.numel() for p in module.parameters()):,} parameters; precision "
            f"{chosen.mode}"
        )
        if backbone.note:
            self.note(backbone.note)
        if compile_for is not None:
            began, data_B = time.perf_counter(), torch.zeros(optim.batch_size, *compile_for, dtype=torch.uint8)
            why = backbone.compile(channels_first(data_B))
            self.note(
                f"--compile: the backbone is not compiled, training goes on without: {why}"
                if why
                else f"--compile: the backbone is compiled, in {time.perf_counter() - began:.0f} s"
            )
        return backbone

    def partial_fc(
        self,
        given: flags.HeadFlags,
        num_classes: int,
        embedding_size: int,
        backbone: TorchBackbone,
        ignore_index: int | None = None,
        name: str = "",
    ) -> PartialFC:
        """Returns the head that the flags describe, for this backbone; `train` applies the rest. ignore_index: of
        PartialFC. name: of one of several heads. Closed at the end."""
        optim, seed = self.config.optim, self.config.run.seed
        head = head_from_flags.build(
            given, num_classes, embedding_size, self.world, backbone.precision, optim, seed, ignore_index, name
        )
        self.parts.enter_context(head)
        self.tables.append((given, head))
        if given.loss_file is not None:
            self.keep_code(given.loss_file)
        first, last = head.shard.start, head.shard.stop - 1
        some = f"{last - first + 1} of {num_classes} classes" + (f", {first} to {last}" if last >= first else "")
        self.logger.info(
            f"{f'head {name}: ' if name else ''}this rank has the centres of "
            f"{some if self.world.size > 1 else f'all {num_classes} classes'}"
        )
        self.logger.info(f"kernel {head.kernel.name}, operands {head.kernel.precision}, {head.optimizer}")
        for note in head_from_flags.notes(given, optim, head):
            self.note(note)
        return head

    def keep_code(self, file: Path) -> None:
        """Copies a file of --network or --loss into the run's folder, where `partial_fc.load` finds the network's."""
        copy = self.root / file.name
        if self.world.rank or (copy.exists() and copy.samefile(file)):
            return
        code = file.read_bytes()
        if copy.exists() and copy.read_bytes() != code:
            self.note(f"{file} has changed since it was copied to {copy}: that copy is replaced")
        make_folders(self.root)
        with replacing(copy) as partial_copy:
            partial_copy.write_bytes(code)

    # ---- train

    def resume(self, backbone: TorchBackbone, head: Head, source: Source | None = None) -> RunState:
        """Loads the checkpoint to start from, for what does not train; returns its state or a new one. A collective."""
        start = resume.resume(self, backbone, head, source)
        return start.state if start else RunState()

    def train(
        self,
        backbone: TorchBackbone,
        head: Head,
        loader: Loader,
        evaluations: Sequence[Evaluation] = (),
        *,
        hooks: Hooks | None = None,
        line: Callable[[int, int, int], StepLine] = StepLine,
        start_from: Callable[[RunState], None] | None = None,
        rates: flags.ScheduleFlags | None = None,
        results: Callable[[Outcome], Mapping[str, Any]] | None = None,
        teacher: Teacher | None = None,
        **settings: Any,
    ) -> int:
        """Resumes, trains to the end, writes checkpoints on the way and model.safetensors and result.json at the end;
        returns the exit status. A collective.

        line: of the log, from (--frequent, steps of the run, samples of an epoch)
        start_from: called with the state before the first step, to load weights of another program
        rates: instead of the flags' schedule
        results: what the recipe adds to result.json; not called if the run was stopped
        teacher: adds to the loss
        settings: of job.Settings, such as each_epoch=True: evaluate and save at the end of an epoch
        """
        saver, order = self.saver(), loader.order
        start = resume.resume(self, backbone, head, loader.source)
        if start is None:
            start_centres.load(self, self.tables, backbone, head, loader.source)
            start = resume.Start()
        if kept := start.differences.kept:
            self.config = flags.replaced(self.config, kept)
        if start_from:
            start_from(start.state)
        data = resume.begin_epoch_anew(self, start.state, order, loader.source)
        loader.seek(start.state.position)
        schedule = course.schedule(self, start, order, backbone.to_input.unit, rates)
        if end.is_finished(self, start, schedule):
            return 0
        lines = line(self.config.run.frequent, schedule.total_steps, order.num_samples)
        job = self._job(
            settings, data, loader=loader, backbone=backbone, head=head, saver=saver, schedule=schedule,
            at=start.state, evaluations=evaluations, line=lines, hooks=hooks or Hooks(),
            class_names=names_of(loader.source, head.num_classes), teacher=teacher,
        )  # fmt: skip
        self.outcome = loop.train(job)
        more: Mapping[str, Any] | None = None
        if results and not self.outcome.stopped:
            more = spare("the recipe's part of result.json", results, self.outcome)
        return end.finish(self, job, self.outcome, more or {})

    def _job(self, settings: Mapping[str, Any], data: Mapping[str, int], *, loader: Loader,
             backbone: TorchBackbone, head: Head, saver: checkpoint.Saver, **parts: Any) -> Job:  # fmt: skip
        """Builds the job from the parts and the flags. A collective."""
        config = self.config
        settings = {
            "accumulate": config.optim.accumulate,
            "accumulate_sum": config.optim.accumulate_sum,
            "clip": config.optim.clip,
            "evaluate_every": config.run.verbose,
            "checkpoint_every": config.run.checkpoint_every,
            "save_best": config.run.save_best,
            "keep": self.keeps,
            **(self.tables[-1][0].settings(config.schedule.lr) if self.tables else {}),
            **settings,
        }
        restore = partial(resume.restore, self, backbone, head, saver)
        return Job(
            world=self.world,
            loader=loader,
            backbone=backbone,
            head=head,
            settings=Settings(**settings),
            guards=Guards(**dataclasses.asdict(config.guards), restore=restore),
            saver=saver,
            name=self.folders.run,
            models_root=self.root,
            logger=self.logger,
            seed=config.run.seed,
            facts={
                "recipe": self.recipe,
                "contract": backbone.contract,
                "configuration": flags.flat(config),
                "versions": self.versions,
                "data": data,
            },
            wandb=open_wandb(config.run.wandb, self.root, flags.flat(config), self.world),
            **parts,
        )
