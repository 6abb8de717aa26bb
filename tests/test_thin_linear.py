"""Linear layers for few tokens: what is launched, with a stand-in for the kernel."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary, ref

import pytest
import torch
from thin_library import CPU, stand_in

from twostroke.kernels.announced import Announcements, Written
from twostroke.kernels.thin_linear import Scaled, ThinLinears, ThinWeight

EPS = 1e-5


@pytest.fixture
def library(monkeypatch):
    return stand_in(monkeypatch)


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def test_weights_that_fit():
    def fits(rows, columns, dtype=torch.bfloat16, gated=False):
        return ThinWeight.fits(torch.empty(rows, columns, dtype=dtype, device="meta"), gated=gated)

    assert fits(4096, 4096)
    assert fits(2 * 14336, 4096, gated=True)
    assert not fits(4096, 4096, torch.float32)
    assert not fits(4100, 4096)
    assert not fits(4096, 4100)
    assert not fits(4104, 4096, gated=True)
    assert not fits(4096, 64)


class Layer:
    """A layer's products, of three tokens, between one attention and the next."""

    def __init__(self, device=CPU):
        self.linears = linears = ThinLinears(device, EPS)
        self.output, self.down = (linears.adding(zeros(128, columns)) for columns in (256, 384))
        self.gate_up, self.qkv = linears.gating(zeros(768, 128)), linears.scaling(zeros(512, 128), zeros(512))
        self.weights = [made.weight.data_ptr() for made in (self.output, self.gate_up, self.down, self.qkv)]

    def add(self):
        """Return what the first product makes."""
        return self.linears.residual(Written(zeros(3, 256)), self.output, zeros(3, 128), zeros(128))

    def run(self):
        x = self.add()
        x = self.linears.residual(self.linears.gated(x, self.gate_up), self.down, x.residual, zeros(128))
        return self.linears.scaled(x, self.qkv)

    def step(self):
        self.linears.begin()
        return self.run()


def test_weights_are_read_where_they_are(library):
    """G11: an engine that slept has them at other addresses than those at which it was built."""
    linears = ThinLinears(CPU, EPS)
    weight, x, norm = zeros(128, 256), zeros(3, 256), zeros(128)
    thin, residual = linears.adding(weight), zeros(3, 128)
    before = weight.data_ptr()
    for _ in range(2):
        linears.residual(Written(x), thin, residual, norm)
        linears.launch()
        weight.data = weight.clone()
    (first, _), (second, read) = library.read()
    assert first == before != second
    assert read == x.data_ptr()


@pytest.mark.parametrize("told", [True, False])
def test_products_tell_each_other(library, told):
    """Each output that a product reads has counts of its own; what attention saw has none, and tells nobody."""
    layer = Layer()
    for _ in range(2):
        (layer.step if told else layer.run)()
    o, gated, added, scaled, *again = library.launched
    assert o.in_ready is None
    assert scaled.out_ready is None
    assert [product.out_ready for product in again] == [product.out_ready for product in (o, gated, added, scaled)]
    if not told:
        assert all(product.in_ready is product.out_ready is None for product in (o, gated, added, scaled))
        return
    for product, following in ((o, gated), (gated, added), (added, scaled)):
        assert product.out_ready == following.in_ready
        assert following.in_count == product.tiles
        assert (
            (following.in_count - 1) * following.in_columns < product.rows <= following.in_count * following.in_columns
        )
    assert [made.out_ready - o.out_ready for made in (gated, added)] == [4 * o.tiles, 4 * (o.tiles + gated.tiles)]


def test_squares_are_of_tiles(library):
    """Each tile writes a line of them, and the next norm adds up all."""
    layer = Layer()
    x = layer.add()
    layer.linears.scaled(x, layer.qkv)
    added, scaled = library.launched
    assert x.squares.shape == (added.tiles, 3)
    assert added.out_squares == scaled.in_squares == x.squares.data_ptr()
    assert (added.tiles, scaled.in_parts) == (layer.output.tiles, layer.output.tiles)
    assert added.tiles > 1


@pytest.mark.parametrize(("begun", "lengths"), [(True, [4, 4]), (False, [1] * 8)])
def test_products_are_launched_in_chains_in_order(library, begun, lengths):
    layer = Layer()
    for _ in range(2):
        (layer.step if begun else layer.run)()
    assert library.lengths == lengths
    assert [weight for weight, _ in library.read()] == layer.weights * 2


def test_a_chain_ends_with_what_is_scaled_or_when_it_is_full(library):
    layer = Layer()
    linears = layer.linears
    more = [linears.adding(zeros(128, 256)) for _ in range(6)]
    linears.begin()
    linears.scaled(layer.add(), layer.qkv)
    assert library.lengths == [2]
    for weight in more:
        linears.residual(Written(zeros(3, 256)), weight, zeros(3, 128), zeros(128))
    assert library.lengths == [2, 4]
    linears.launch()
    linears.launch()
    assert library.lengths == [2, 4, 2]
    assert [weight for weight, _ in library.read()][2:] == [made.weight.data_ptr() for made in more]


def test_a_kernel_has_no_more_clusters_than_tiles(library):
    """Nor than run at once: a chain whose blocks did not all run would wait for ever."""
    linears = ThinLinears(CPU, EPS)
    few, more, most = (linears.scaling(zeros(rows, 256)) for rows in (200, 4096, 16384))
    for weight in (few, more, most):
        linears.scaled(Scaled(zeros(3, 256), zeros(3, 256), None), weight)
    assert library.clusters == [few.tiles, more.tiles, 66]
    assert few.tiles < more.tiles < 66 < most.tiles


def test_queued_products_keep_the_memory_they_use(library):
    """Else what the step allocates next would lie there, and be overwritten."""
    layer = Layer()
    linears, used = layer.linears, []

    def kept(tensor):
        used.append(ref(tensor))
        return tensor

    linears.begin()
    added = linears.residual(Written(kept(zeros(3, 256))), layer.output, kept(zeros(3, 128)), kept(zeros(128)))
    used += map(ref, added[:3])
    del added
    x = Scaled(zeros(3, 128), kept(zeros(3, 128)), kept(torch.zeros(2, 3)))
    used.append(ref(linears.gated(x, layer.gate_up).values))
    del x
    assert library.chains == []
    assert all(tensor() is not None for tensor in used)
    linears.launch()
    assert library.lengths == [2]
    assert all(tensor() is None for tensor in used), "nobody needs it any more"


def test_queued_products_keep_their_weights(library):
    linears = ThinLinears(CPU, EPS)
    weight = zeros(128, 256)
    weights = ref(weight)
    linears.residual(Written(zeros(3, 256)), linears.adding(weight), zeros(3, 128), zeros(128))
    del weight
    assert weights() is not None
    linears.launch()
    assert weights() is None


def test_a_refused_launch_leaves_nothing_behind(library):
    layer = Layer()
    library.code = 700
    with pytest.raises(RuntimeError, match="thin_linear: launch failed with CUDA error 700"):
        layer.step()
    library.code = 0
    layer.linears.launch()
    assert library.chains == []
    layer.step()
    assert library.lengths == [4]


def test_a_failed_step_leaves_the_next_one_nothing(library):
    """Products of the one would announce what those of the other have not written."""
    layer = Layer()
    layer.linears.begin()
    layer.add()
    layer.step()
    assert library.lengths == [4]


def lengths_of(library, layer):
    before = len(library.chains)
    layer.step()
    return library.lengths[before:]


def test_only_one_of_a_device_makes_chains(library):
    """Blocks of two chains could wait for each other for ever."""
    first, second, elsewhere = (Layer(torch.device("cuda", index)) for index in (0, 0, 1))
    assert [lengths_of(library, layer) for layer in (first, second, first, elsewhere)] == [[4], [1] * 4, [4], [4]]
    del first
    assert lengths_of(library, second) == [4]
    third = Layer(torch.device("cuda", 0))
    assert lengths_of(library, third) == [1] * 4
    assert (second.linears.chains, third.linears.chains) == (True, False)


def test_a_device_without_a_number_is_the_current_one(library):
    devices = [torch.device("cuda", 0), torch.device("cuda")]
    assert [made.chains for made in [ThinLinears(device, EPS) for device in devices]] == [True, False]


class SlowDictionary(WeakValueDictionary):
    def setdefault(self, key, default=None):
        found = self.get(key)
        time.sleep(0.01)  # another thread may take its turn here
        if found is None:
            self[key] = found = default
        return found


def test_one_of_many_threads_makes_chains(library, monkeypatch):
    monkeypatch.setattr(ThinLinears, "_chaining", SlowDictionary())
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: ThinLinears(CPU, EPS), range(4)))
    assert sum(linears.chains for linears in made) == 1


@pytest.mark.parametrize(
    ("rows", "gated", "tile"),
    [
        (4096, False, 64),
        (28672, True, 64),
        (6144, False, 48),
        (7392, False, 56),
        (7392, True, 64),
        (128256, False, 64),
    ],
)
def test_tiles_give_clusters_about_as_much_to_do(library, rows, gated, tile):
    linears = ThinLinears(CPU, EPS)
    weight = torch.empty(rows, 256, dtype=torch.bfloat16, device="meta")
    made = linears.gating(weight) if gated else linears.scaling(weight)
    assert made.tile == tile
    assert (made.tiles - 1) * tile < rows <= made.tiles * tile
    assert made.out_columns == (tile // 2 if gated else tile)


def test_gated_tiles_have_whole_eights_of_each_half(library):
    linears = ThinLinears(CPU, EPS)
    for rows in range(16, 20000, 16 * 7):
        weight = torch.empty(rows, 256, dtype=torch.bfloat16, device="meta")
        assert linears.gating(weight).tile % 16 == 0


def test_announcements_of_a_step():
    told = Announcements(5, CPU)
    for _ in range(2):
        told.begin()
        outputs = told.take(2, 64), told.take(3, 56)
        assert [(len(counts), columns) for counts, columns in outputs] == [(2, 64), (3, 56)]
        for counts, _ in outputs:
            assert not counts.any()
            counts += 1
    with pytest.raises(RuntimeError, match="6 parts at least: there is room for 5"):
        told.take(1, 8)
