"""What is around the loop, the same for every recipe: how a run starts, what it goes on from, what it leaves behind.

    def main(arguments):
        config, notes = parse(arguments)
        status = launch(config, called=("faces", "r50"))    # begin/start.py, before torch is imported
        if status is not None:
            return status
        return run_in_worlds("face", config, notes, train_here, called=("faces", "r50"))

    def train_here(run):
        source = run.open_data(...)                      # data
        backbone, head = run.backbone(...), ...          # model
        with run.saver(checkpoint.Saver) as saver:
            start = run.resume(backbone, head, saver)    # a checkpoint, or a fresh start
            schedule = run.schedule(start, order)
            if run.is_finished(start, schedule):
                return 0
            outcome = train(run.job(...))
            return run.finish(job, outcome, {})

A Config has the flag groups launch, run, guards, exchange, optim and schedule (flags/). Where hosts come and go
train_here is called anew in each world.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from partial_fc import checkpoint, flags
from partial_fc.checkpoint.peer.commits import Memory
from partial_fc.comm import elastic
from partial_fc.comm.device import meet
from partial_fc.data import Loader, Source, Synthetic, open_on_all
from partial_fc.data.loader import Transform
from partial_fc.data.order import Order
from partial_fc.evaluate import Evaluation
from partial_fc.files import make_folders
from partial_fc.head import check_head
from partial_fc.models.inputs import InputContract
from partial_fc.optim import backbone as torch_optim
from partial_fc.optim.gradient_sync import broadcast_module
from partial_fc.optim.schedule import Continued, Schedule, continued, linear_scaling
from partial_fc.train import resume
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.batch_norm import convert
from partial_fc.train.begin import run_folder
from partial_fc.train.begin.start import is_asked_for, named
from partial_fc.train.context import RunContext
from partial_fc.train.guards.commits import Commits
from partial_fc.train.job import Guards, Head, Job, Outcome, RunState, Settings
from partial_fc.train.precision import Mode, Precision, choose
from partial_fc.train.record import header
from partial_fc.train.record.boards import open_wandb
from partial_fc.train.record.log import SecondFile, StepLine, open_files
from partial_fc.train.results import write_results

S = TypeVar("S", bound=Source)
V = TypeVar("V", bound=checkpoint.Saver)


def run_in_worlds(
    recipe: str,
    config: Any,
    notes: Sequence[str],
    train_here: Callable[["Run"], int],
    bare: bool = False,
    hist: SecondFile | None = None,
    called: tuple[str | Path, str] | None = None,
) -> int:
    """Joins the others, runs train_here, returns the exit status. bare: the terminal's lines have nothing before them.
    hist: of the log, see `open_files`; only a recipe with such lines has --log-style. called: data set and network, for
    a --models-root that nobody has given. Where hosts come and go, anew in each world, with what the processes have
    kept."""
    memory, asked = Memory(), is_asked_for(config)
    config = named(config, called)
    if config.run.log_style != "own" and hist is None:
        raise ValueError(f"--log-style {config.run.log_style} is for recipe face; recipe {recipe} has lines of its own")

    def in_this_world() -> int:
        world, its_device = meet(config.launch)
        held = run_folder.hold(config, world, memory)
        logger = open_files(config.run.models_root, world, bare, hist)
        run = Run(recipe, config, world, its_device, logger, memory, keeps_made_up=asked)
        header.begin(run)
        for note in (*held, *notes, *flags.notes(config, world.size)):
            run.note(note)
        return train_here(run)

    try:
        return elastic.run(in_this_world) or 0
    finally:
        run_folder.let_go(memory)


class Run(RunContext):
    """One run in one world: the verbs of its start and end."""

    # ---- data

    def open_data(self, opened: Callable[[], S]) -> S:
        """What every rank opens, once all have opened the same. Raises ValueError, on all ranks, where they have not. A
        collective."""
        age_W = self.world.all_gather(torch.tensor([self.memory.age]), name="run/age").tolist()
        self.data_is_new = not any(age_W)
        source = open_on_all(opened, self.world, [age > 0 for age in age_W])
        if isinstance(source, Synthetic) and not self.keeps_made_up:
            self.keeps = False
            self.note("the images are made up: no checkpoints or weights are written unless --models-root is given")
        return source  # type: ignore[return-value]

    def loader(
        self, source: Source, transform: Transform, start: RunState, order: Order | None = None, **more: Any
    ) -> Loader:
        """This rank's batches from where the run starts; more: of Loader."""
        return Loader(
            source,
            transform,
            order,
            batch_size=self.config.optim.batch_size,
            rank=self.world.rank,
            world_size=self.world.size,
            seed=self.config.run.seed,
            position=start.position,
            pin_memory=self.device.type == "cuda",
            **more,
        )

    # ---- start

    def saver(self, kind: type[V]) -> AbstractContextManager[V]:
        """What writes the checkpoints, below --checkpoint-dir; kind: checkpoint.Saver, or one of the recipe's own."""
        run = self.config.run
        owner = self.memory.fences.get(run.checkpoints)
        return closing(kind(run.checkpoints, self.world, run.keep_checkpoints, run.save_best, owner))

    def backbone(
        self,
        module: nn.Module,
        to_input: InputContract,
        contract: Mapping[str, str],
        precision: Mode | None = None,
        **optimizer: Any,
    ) -> TorchBackbone:
        """What the shared flags make of a module: on this run's device, equal on all ranks. contract: see
        TorchBackbone. precision: the only one that the module has. optimizer: more for `optim.backbone.build`. A
        collective."""
        optim, world = self.config.optim, self.world
        chosen = Precision(precision or choose(optim.precision, self.device, world), self.device)
        module.to(self.device, chosen.parameter_dtype)
        broadcast_module(module, world)
        if optim.sync_bn:
            module = convert(module, world)
        make = partial(
            torch_optim.build, optim.optimizer, momentum=optim.momentum, weight_decay=optim.weight_decay, **optimizer
        )
        exchange = self.config.exchange.build(self.config.run.seed)
        backbone = TorchBackbone(module, world, chosen, make, exchange, to_input, contract)
        self.logger.info(
            f"{contract['network']}: {sum(p.numel() for p in module.parameters()):,} parameters; precision "
            f"{chosen.mode}"
        )
        if backbone.note:
            self.note(backbone.note)
        return backbone

    def resume(self, backbone: TorchBackbone, head: Head, source: Source | None = None, **more: Any) -> RunState:
        """Gives backbone and head the state that the run starts from; see `resume.resume`."""
        return resume.resume(self, backbone, head, source, **more)

    def lengths(self, order: Order) -> tuple[int, int]:
        """(updates of the run, updates of its warm-up). Raises ValueError where the second do not fit into the first,
        so recipes ask as soon as the data is open."""
        given, steps_per_epoch = self.config.schedule, order.num_samples / self.global_batch
        total = self._total_steps(order, given.epochs, given.max_steps)
        warmup = given.warmup_steps + round(given.warmup_epochs * steps_per_epoch)
        if 0 < total <= warmup:
            ends = f"--max-steps {given.max_steps}" if given.max_steps else f"--epochs {given.epochs:g}"
            raise ValueError(
                f"the warm-up takes {warmup} updates (--warmup-steps {given.warmup_steps}, --warmup-epochs "
                f"{given.warmup_epochs:g} of {steps_per_epoch:.1f} updates each), and the run ends after {total} "
                f"({ends}); for a short try give --warmup-steps 0 --warmup-epochs 0, or else train for longer"
            )
        return total, warmup

    def schedule(self, start: RunState, order: Order) -> Schedule | Continued:
        """The course of the learning rate from the start of the run to its end. Raises ValueError where the run starts
        beyond that."""
        course = self._course(order)
        schedule = self._from(start, order, course)
        if start.step < schedule.total_steps:
            self._note_other_length(course, schedule, start.step, order)
        return schedule

    def _note_other_length(self, course: Schedule, schedule: Schedule | Continued, step: int, order: Order) -> None:
        """The rate of a step may depend on where the run ends."""
        given = vars(self.config.schedule)
        changed = {name: value for name, value in self.length_before.items() if value != given[name]}
        if not changed:
            return
        words = "; with ".join(
            f"{flags.flag(name)} {value}, this run has {given[name]}" for name, value in changed.items()
        )
        now = schedule.lr(step)
        rate = f"the learning rate of the next step is {now:g}"
        total = self._total_steps(order, **self.length_before)
        if total > course.warmup_steps:  # else it warmed up otherwise, too: that is another flag's note
            was = dataclasses.replace(course, total_steps=total)
            like = step + (schedule.shift if isinstance(schedule, Continued) else 0)
            then = was.lr(min(like, total))
            if then == now:  # the schedule does not look at the end
                return
            rate += f", and was to be {then:g}"
        self.note(f"the checkpoint was trained with {words}: allowed, but {rate}")

    def _from(self, start: RunState, order: Order, course: Schedule) -> Schedule | Continued:
        """The part of a course that remains."""
        seen = start.position - sum(end - begin for begin, end in start.left_out)
        shift = order.updates_at(seen, self.global_batch) - start.step
        if self.config.schedule.max_steps or not shift:
            if start.step > course.total_steps:
                raise ValueError(
                    f"the checkpoint to go on from is at step {start.step}, beyond this run's {course.total_steps}; "
                    "use another --models-root, or more --epochs or --max-steps"
                )
            return course
        total = self.config.schedule.epochs * order.num_samples
        schedule = continued(course, start.step, order.updates_to(seen, total, self.global_batch), shift)
        left, like = schedule.total_steps - start.step, start.step + schedule.shift
        self.logger.info(
            f"{seen:,} of {total:,.0f} images have been seen in {start.step} steps; with {self.global_batch} a "
            f"step {left} more steps remain, {schedule.total_steps} in all; learning rate {schedule.lr(start.step):g}, "
            f"as in step {like:.1f} of {course.total_steps} of this size"
        )
        return schedule

    def _course(self, order: Order) -> Schedule:
        given = self.config.schedule
        steps_per_epoch = order.num_samples / self.global_batch
        total_steps, warmup_steps = self.lengths(order)
        micro_batches = f" x {self.config.optim.accumulate}" if self.config.optim.accumulate > 1 else ""
        self.logger.info(
            f"{order.num_samples:,} images; global batch {self.world.size} x {self.config.optim.batch_size}"
            f"{micro_batches} = {self.global_batch}; {steps_per_epoch:.1f} steps an epoch, {total_steps} steps in all"
        )
        lr = given.lr
        if given.lr_scaling == "linear":
            lr, arithmetic = linear_scaling(given.lr, given.base_batch_size, self.global_batch)
            self.logger.info(arithmetic)
        if given.lr_scheduler == "step" and given.lr_steps and self.global_batch != given.base_batch_size:
            self.note(
                "--lr-steps and --max-steps count updates and are not scaled: this run's updates see "
                f"{self.global_batch} images, those of the preset {given.base_batch_size}"
            )
        return Schedule(
            kind=given.lr_scheduler,
            base_lr=lr,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            warmup_start=given.warmup_lr if given.warmup_steps or given.warmup_epochs else 0.0,
            decay_steps=given.lr_steps if given.lr_scheduler == "step" else (),
            decay_every=max(1, int(given.lr_step_epochs * steps_per_epoch))
            if given.lr_step_epochs and given.lr_scheduler == "step"
            else 0,
            factor=given.lr_factor,
            power=given.lr_power,
        )

    def _total_steps(self, order: Order, epochs: float, max_steps: int | None = None) -> int:
        return max_steps or order.updates_to(0, epochs * order.num_samples, self.global_batch)

    def is_finished(self, start: RunState, schedule: Schedule | Continued) -> bool:
        """Whether there is nothing to train any more, and rank 0, which writes it, finds a result: each host may have a
        folder of its own. Says so, and leaves the world. A collective where all is trained."""
        if start.step != schedule.total_steps:
            return False
        there = torch.tensor([int((self.root / "result.json").exists())])
        if not self.world.broadcast(there, name="run/finished").item():
            return False
        if self.differences:
            raise ValueError(
                f"{self.root} holds a finished run, with {'; with '.join(self.differences)}: nothing would be trained. "
                "Start anew with --models-root NEW, or go on with more --max-steps or --epochs"
            )
        self.logger.info(
            f"{self.root} is finished, see result.json; to go on give more --max-steps or --epochs, to start anew "
            "another --models-root"
        )
        self.world.close()
        return True

    # ---- train

    def job(
        self,
        loader: Loader,
        backbone: TorchBackbone,
        head: Head,
        schedule: Schedule | Continued,
        evaluations: Sequence[Evaluation],
        saver: checkpoint.Saver,
        start: RunState,
        line: StepLine,
        *,
        class_names: list[str] | None = None,
        in_memory: bool = True,
        **settings: Any,
    ) -> Job:
        """in_memory: whether the head's rows are, so that commits can be kept there, too. settings: of job.Settings,
        besides those that the shared flags say. A collective."""
        config = self.config
        settings = {
            "accumulate": config.optim.accumulate,
            "clip": config.optim.clip,
            "evaluate_every": config.run.verbose,
            "checkpoint_every": config.run.checkpoint_every,
            "save_best": config.run.save_best,
            "keep": self.keeps,
            **settings,
        }
        check_head(head)
        restore = partial(resume.restore, self, backbone, head, saver, loader.source)
        return Job(
            world=self.world,
            loader=loader,
            backbone=backbone,
            head=head,
            schedule=schedule,
            evaluations=evaluations,
            settings=Settings(**settings),
            guards=Guards(**dataclasses.asdict(config.guards), restore=restore),
            saver=saver,
            commits=Commits(self.memory, self.world, self._commit_every(in_memory)),
            at=start,
            line=line,
            models_root=self.root,
            logger=self.logger,
            seed=config.run.seed,
            facts={
                "recipe": self.recipe,
                "contract": backbone.contract,
                "configuration": flags.flat(config),
                "versions": self.versions,
            },
            class_names=class_names,
            wandb=open_wandb(config.run.wandb, self.root, flags.flat(config), self.world),
        )

    def _commit_every(self, in_memory: bool) -> int:
        """Steps between commits; 0: none. Only ranks that come and go go on from them."""
        asked = self.config.run.commit_every
        if not elastic.active():
            return 0
        return asked if asked is not None else 100 if in_memory else 0

    # ---- end

    def finish(
        self, job: Job, outcome: Outcome, more: Mapping[str, Any], deliver: Callable[..., Any] | None = None
    ) -> int:
        """Writes what came out, leaves the world, returns the exit status. more: what the recipe adds to result.json.
        deliver: called by rank 0 with the weights and a prefix of files that are to hold them besides
        model.safetensors. Raises OSError where the last state is in no checkpoint. A collective."""
        if outcome.stopped:
            self.logger.info(f"stopped at step {job.at.step}, as asked; {self._where_to_go_on(job)}")
        else:
            weights, _ = job.backbone.state()  # as evaluated: with the statistics of all ranks together
            weights = {name: t.detach().cpu() for name, t in weights.items()}
            if self.world.rank == 0:
                make_folders(self.root)  # somebody may have removed it
                if self.keeps and deliver:
                    deliver(weights, self.root / "model")
                write_results(self, job, outcome, weights, more)
            self.world.barrier(name="end")
            written = self.root / "result.json"
            # Where the folder is each host's own.
            elsewhere = f"{written} is on the host of rank 0"
            self.logger.info(f"Training is over! {written if written.exists() else elsewhere}")
        if not outcome.saved:
            raise OSError(
                f"the last state, of step {job.at.step}, is in no checkpoint below {job.saver.root}: see above"
            )
        self.world.close()
        return outcome.stopped

    def _where_to_go_on(self, job: Job) -> str:
        if not self.keeps:
            return "of images that are made up nothing is kept"
        newest, asked = checkpoint.newest(job.saver.root), self.config.run.resume
        if not newest:
            return "there is no checkpoint to go on from"
        if asked in ("auto", "same"):
            return f"the same command goes on from {newest}"
        return f"the same command with --resume auto, in place of --resume {asked}, goes on from {newest}"
