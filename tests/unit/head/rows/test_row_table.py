"""Where rows lie and how they rest: every place gives the same bits, and rounding is what counter_rng.py says it is."""

import math
import struct

import pytest
import torch

from partial_fc import counter_rng
from partial_fc.head.rows import RowAdagrad, RowAdamW, RowOptimizer, RowSGD, RowTable, Storage
from partial_fc.head.rows import table as module
from partial_fc.head.rows.storage import round_stochastically
from partial_fc.head.rows.table import initial_centres

L, D, FIRST, SEED = 203, 7, 1000, 3
BF16 = torch.bfloat16
PLACES = ("device", "host", "host, as copies")


@pytest.fixture
def make(monkeypatch):
    """make(place, ...) -> RowTable; "as copies": handled as for a device that cannot index ordinary memory."""
    made: list[RowTable] = []

    def centres(
        place: str = "device", optimizer: RowOptimizer | None = None, dtype=torch.float32, state_dtype=None, **o
    ):
        monkeypatch.setattr(module, "indexes_copies", lambda storage, device: "copies" in place)
        storage = Storage(dtype, state_dtype, place.split(",")[0])
        made.append(RowTable(FIRST, L, D, SEED, optimizer or RowSGD(), storage, "cpu", **o))
        return made[-1]

    yield centres
    for ours in made:
        ours.close()


def drawn(step: int, num: int = 30) -> torch.Tensor:
    return torch.randperm(L, generator=torch.Generator().manual_seed(step))[:num].sort().values


def train(ours: RowTable, steps: range, prefetch: bool = True) -> None:
    """Sampled steps whose gradients depend on the centres; what is fetched is the drawn rows and two more, and the
    rows that the next step draws overlap with it."""
    for step in steps:
        if step == 6:
            row_S = None
        else:
            row_S = torch.unique(torch.cat((drawn(step), torch.tensor([step, L - 1]))))
        if step % 3 == 0:  # another forward in the same step
            ours.fetch(torch.tensor([1, 100, 150]), step)
        table, place_S = ours.fetch(row_S, step)
        if prefetch:
            ours.prefetch(drawn(step + 1))
        rows = table if place_S is None else table[place_S]
        if row_S is not None and place_S is None:
            assert len(table) == len(row_S)
        grad = torch.sin(100 * rows.to(torch.float32)) + step / 10
        for begin in range(0, len(grad), 11):
            end = min(begin + 11, len(grad))
            row_K = None if row_S is None else row_S[begin:end]
            ours.update(row_K, begin, end, grad[begin:end].clone(), 0.1 / (step + 1), step)


@pytest.mark.slow
@pytest.mark.parametrize("catch_up", ["none", "exact"])
@pytest.mark.parametrize(
    ("optimizer", "dtype", "state_dtype"),
    [
        (RowSGD(), torch.float32, None),
        (RowSGD(nesterov=True), BF16, None),
        (RowAdamW(), torch.float16, BF16),
        (RowAdamW(), BF16, torch.float32),
        (RowAdagrad(weight_decay=0.1), BF16, None),
    ],
    ids=str,
)
def test_all_places_give_the_same_bits_with_and_without_prefetching(make, optimizer, dtype, state_dtype, catch_up):
    results = []
    for place in PLACES:
        for prefetch in (True, False):
            ours = make(place, optimizer, dtype, state_dtype, catch_up=catch_up)
            train(ours, range(6), prefetch)
            before = {name: rows.clone() for name, rows in ours.row_state().items()}
            train(ours, range(6, 10), prefetch)
            results.append((before, {name: rows.clone() for name, rows in ours.row_state().items()}))
    for before, after in results[1:]:
        for name, rows in results[0][0].items():
            assert torch.equal(before[name], rows), name
        for name, rows in results[0][1].items():
            assert torch.equal(after[name], rows), name
    touched = results[0][0]["touched"].flatten()
    untouched = touched == 0
    assert 20 < untouched.sum() < 180
    for name, rows in results[0][0].items():
        if name != "centres":
            assert not rows[untouched].any(), name
    assert results[0][0]["centres"].dtype == dtype


@pytest.mark.parametrize("place", PLACES)
def test_start_values_depend_on_seed_and_row_alone(make, place):
    expected = initial_centres(torch.arange(FIRST, FIRST + L), D, SEED)
    ours = make(place)
    row = torch.tensor([0, 5, L - 1])
    table, place_S = ours.fetch(row, 0)
    assert torch.equal(table if place_S is None else table[place_S], expected[row])
    assert int((ours.row_state()["centres"] != 0).any(dim=1).sum()) == 3, "no other row was made"
    assert torch.equal(ours.all_rows(), expected)
    halves = [RowTable(FIRST + a, b - a, D, SEED, RowSGD(), Storage(), "cpu") for a, b in ((0, 99), (99, L))]
    assert torch.equal(torch.cat([half.all_rows() for half in halves]), expected)
    other = initial_centres(torch.arange(FIRST, FIRST + L), D, SEED + 1)
    assert not (other == expected).all(dim=1).any()
    many = initial_centres(torch.arange(10_000) << 20, D, SEED)
    assert abs(many.std() - 0.01) < 1e-4
    assert abs(many.mean()) < 2e-4


@pytest.mark.parametrize("place", PLACES)
def test_rows_go_through_row_state(make, place):
    first, whole = make(place, RowAdamW()), make(place, RowAdamW())
    train(first, range(5))
    train(whole, range(10))
    second = make(place, RowAdamW())
    train(second, range(3))  # what it had is gone afterwards, also of rows that `first` has not made
    second.load_row_state({name: rows.clone() for name, rows in first.row_state().items()})
    train(second, range(5, 10))
    assert torch.equal(second.all_rows(), whole.all_rows())
    for name, rows in whole.row_state().items():
        assert torch.equal(second.row_state()[name], rows), name


def test_rows_are_converted_to_the_dtypes_of_who_loads_them(make):
    first, second = make(), make(dtype=BF16, state_dtype=torch.float16)
    train(first, range(5))
    second.load_row_state(first.row_state())
    assert torch.equal(second.centre_LD, first.centre_LD.to(BF16))
    assert torch.equal(second.row_state()["momentum"], first.row_state()["momentum"].half())
    assert torch.equal(second.all_rows(), first.all_rows().to(BF16)), "start values, too, are rounded to nearest"
    with pytest.raises(ValueError, match=r"\['centres', 'touched'\]; expected \['centres', 'momentum', 'touched'\]"):
        second.load_row_state({name: first.row_state()[name] for name in ("centres", "touched")})
    with pytest.raises(ValueError, match="touched has shape"):
        second.load_row_state({**first.row_state(), "touched": torch.zeros(L, dtype=torch.int32)})


def test_a_loaded_row_that_no_step_has_touched_is_kept(make):
    """Centres may come from elsewhere."""
    ours = make()
    mine = torch.randn(L, D)
    ours.load_row_state({**{name: torch.zeros_like(t) for name, t in ours.row_state().items()}, "centres": mine})
    assert torch.equal(ours.fetch(torch.tensor([4]), 0)[0][4], mine[4])


def test_no_rows_at_all():
    ours = RowTable(L, 0, D, SEED, RowSGD(), Storage(), "cpu", "exact")
    ours.fetch(torch.empty(0, dtype=torch.int64), 0)
    ours.update(torch.empty(0, dtype=torch.int64), 0, 0, torch.empty(0, D), 0.1, 0)
    ours.fetch(None, 1)
    assert ours.all_rows().shape == (0, D)


# ---- rounding


def test_rounding_noise_is_what_it_is_said_to_be():
    """In whole numbers of Python, for odd widths and row numbers beyond 32 bits."""
    rows = [0, 1, 77, (1 << 33) + 5, (1 << 40) + 77]
    key, mix = counter_rng.rounding_key(11, 1, 12345), counter_rng.hash32
    assert key == counter_rng.derive_key(11, 1, 12345, *b"rounding")
    for width in (1, 2, 9):
        noise = counter_rng.rounding_noise(torch.tensor(rows), width, key)
        for row, values in zip(rows, noise.tolist(), strict=True):
            row_key = mix(mix((row & 0xFFFFFFFF) + key) ^ (row >> 32))
            words = [mix((row_key + j) & 0xFFFFFFFF) for j in range((width + 1) // 2)]
            assert values == [part for word in words for part in (word & 0xFFFF, word >> 16)][:width]


def test_rounding_adds_noise_to_the_bits_and_cuts():
    x = torch.tensor([[1.0, -1.003, 3.14159, 0.0, -0.0, 1e-40, math.inf, -math.inf, math.nan]])
    weird = struct.unpack("<f", struct.pack("<I", 0x7FFFFFFF))[0]  # a NaN whose bits would wrap around
    x = torch.cat((x, torch.tensor([[weird]])), dim=1)
    row, key = torch.tensor([9]), 5
    noise = counter_rng.rounding_noise(row, x.shape[1], key)[0].tolist()
    rounded = round_stochastically(x, row, key)
    bits = [b & 0xFFFFFFFF for b in x.view(torch.int32)[0].tolist()]
    finite = x.isfinite()[0].tolist()
    expected = [(b + n * f) >> 16 for b, n, f in zip(bits, noise, finite, strict=True)]
    assert [b & 0xFFFF for b in rounded.contiguous().view(torch.int16)[0].tolist()] == expected
    assert rounded[0, 0] == 1
    assert rounded[0, 6:8].tolist() == [math.inf, -math.inf]
    assert rounded[0, 8:].isnan().all()


def test_rounding_is_unbiased_and_goes_to_a_neighbour():
    x = torch.randn(1, 8).expand(40_000, 8).contiguous()
    rounded = round_stochastically(x, torch.arange(len(x)), counter_rng.rounding_key(0, 0, 1)).float()
    step = torch.exp2(torch.floor(torch.log2(x[0].abs())) - 7)  # between neighbours
    assert ((rounded - x).abs() < step).all()
    assert ((rounded.mean(dim=0) - x[0]).abs() < step * 4 * 0.5 / math.sqrt(len(x))).all()
    exact = x.bfloat16().float()
    assert torch.equal(round_stochastically(exact, torch.arange(len(x)), 7).float(), exact)


def test_catching_up_rounds_with_the_noise_of_the_last_missed_step(make):
    """The noise of the step at hand is for the update that follows: the same twice would not be independent."""
    ours, wide = (make(optimizer=RowSGD(0.9, 0.1), dtype=dtype, catch_up="exact") for dtype in (BF16, torch.float32))
    row = torch.tensor([4])
    for c in (ours, wide):
        c.load_row_state({**c.row_state(), "centres": torch.linspace(1, 2, L * D).bfloat16().view(L, D)})
        for step in range(3):
            c.update(None, 0, 0, torch.empty(0, D), 0.1, step)
        c.fetch(row, 3)
    for stream, name in enumerate(("centres", "momentum")):
        expected = round_stochastically(
            wide.row_state()[name][row], row + FIRST, counter_rng.rounding_key(SEED, stream, 2)
        )
        assert torch.equal(ours.row_state()[name][row], expected)


def test_storage_that_makes_no_sense_is_refused():
    for arguments in ({"dtype": torch.int8}, {"state_dtype": torch.int32}, {"place": "tape"}, {"place": "disk"}):
        with pytest.raises(ValueError, match=r"expected one of|expected device"):
            Storage(**arguments)
