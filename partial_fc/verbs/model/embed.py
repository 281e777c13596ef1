"""`partial-fc embed`: the embeddings of many images, as a table."""

from contextlib import nullcontext

import torch

from partial_fc import terminal
from partial_fc.comm import World
from partial_fc.data import ImageFolder, open_on_all
from partial_fc.embedding.load import load
from partial_fc.embedding.on_ranks import embedded, why_bad
from partial_fc.embedding.sources import ImageFiles, open_images
from partial_fc.findings import counted
from partial_fc.verbs.model.embed_options import EmbedOptions
from partial_fc.verbs.model.table import new_table
from partial_fc.verbs.on_ranks import on_ranks

_NAMED = 10  # bad images that are named


def embed(options: EmbedOptions) -> None:
    on_ranks("partial-fc embed", options.launch, lambda world, device: _embed(options, world, device))


def _embed(options: EmbedOptions, world: World, device: torch.device) -> None:
    model = load(options.model, device, image_size=options.image_size, flip=options.flip)
    source = open_on_all(lambda: open_images(options.images), world)
    leads, num_bad = world.rank == 0, 0
    if leads:
        print(f"{model}; {counted(len(source), 'image')} on {world}", flush=True)
        if isinstance(source, ImageFolder) and source.left_out:
            print(f"files are left out: {source.left_out_text()}", flush=True)
    facts = {"source": str(model.source), **model.facts()}
    labelled = not isinstance(source, ImageFiles)
    names = source.class_names() if labelled else None
    table_of_all = new_table(options.out, len(source), model.embedding_size, labelled, names, facts)
    bar = terminal.bar(total=len(source), unit="image", desc="embed", shown=leads)
    with bar, table_of_all if leads else nullcontext() as table:
        for part in embedded(model, source, world, options.batch_size, options.num_workers):
            for index in part.bad:
                reason = why_bad(source, index)
                if options.on_bad == "stop":
                    raise ValueError(f"{reason} (image {index} of {len(source)}; --on-bad nan goes on without)")
                num_bad += 1
                if leads and num_bad <= _NAMED:
                    terminal.say(f"NaN: {reason}")
            if table is not None:
                keys = [source.key(part.first + i) for i in range(len(part.row_ID))]  # type: ignore[attr-defined]
                table.add(keys, part.label_I, part.row_ID)
            bar.update(len(part.row_ID))
    world.barrier(name="embed/written")
    if leads:
        bad = f"; NaN for {counted(num_bad, 'image')} that could not be used" if num_bad else ""
        print(f"{options.out}: {len(source):,} x {model.embedding_size}{bad}")
