"""Data sharing against a plain loop over the enlarged clients; who receives what, and what it costs."""

from dataclasses import replace

import pytest
import torch

from fl_lightning import streams
from fl_lightning.data.partition import Split, held_out, partition
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import Diverged, UserError
from fl_lightning.methods.data_sharing import DataSharing
from fl_lightning.methods.fedavg import FedAvg
from tests.support import references
from tests.support.cases import equal_bits, final, largest_difference, ragged

NOTHING = torch.empty(0, dtype=torch.long)
SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "partial cohorts": {"fraction": 0.5},
    "stragglers": {"straggler_fraction": 0.5, "epochs": 4},
    "uniform weights": {"weighting": "uniform"},
}


def enlarged(case, number):
    """Every client with data, and `number` samples of the held-out set from a stream of its own."""
    clients = []
    for n, indices in enumerate(case.clients):
        order = torch.randperm(len(case.holdout), generator=streams.generator(case.seed, "shared data", n))
        clients.append(torch.cat([indices, case.holdout[order[:number]]]) if len(indices) else indices)
    return case._replace(clients=clients)


def descend(case, params, batches, lr):
    for batch in batches:
        grad = references.gradient(case, params, batch)
        params = {name: params[name] - lr * grad[name] for name in params}
    return params


def reference(case, number, weights, x):
    bigger = enlarged(case, number)
    for turn in range(1, case.federation.rounds + 1):
        models = {n: descend(case, x, references.batches(bigger, n, turn), case.training.lr) for n in weights}
        x = {name: sum(weights[n] * models[n][name] for n in weights) for name in x}
    return x


@pytest.mark.parametrize("engine", [Functional(chunk=1), Functional(chunk=8), Lightning()])
@pytest.mark.parametrize(("share", "number"), [(0.5, 6), (1.0, 12), (0.3, 4)])
def test_equals_brute_force(engine, share, number):
    case = ragged()
    weights = references.weights(case, references.members(case))
    expected = reference(case, number, weights, references.initial(case))
    assert largest_difference(final(case.run(DataSharing(share=share), engine)), expected) < 1e-13


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("sharing", ["no data to share", "no share", "a share that rounds to nothing"])
def test_nothing_shared_is_fedavg(sharing, setting):
    case = ragged(torch.float32)
    method = DataSharing(share={"no share": 0.0, "a share that rounds to nothing": 0.04}.get(sharing, 0.5))
    if sharing == "no data to share":
        case = case._replace(holdout=NOTHING)
    ours, fedavg = case.run(method, **SETTINGS[setting]), case.run(FedAvg(), **SETTINGS[setting])
    for mine, theirs in zip(ours, fedavg, strict=True):
        assert mine.cohort == theirs.cohort._replace(server=mine.cohort.server)
        assert equal_bits(mine.after.state.params, theirs.after.state.params)


def test_shared_data_change_the_result():
    case = ragged()
    assert largest_difference(final(case.run(DataSharing())), final(case.run(FedAvg()))) > 1e-3


def test_every_client_receives_its_own_draw_of_the_held_out_data():
    labels = torch.arange(1000) % 10
    split = Split(clients=5, alpha=0.1, holdout=0.1)
    own, holdout = partition(labels, split, seed=3), held_out(labels, split, seed=3)
    assert not set(holdout.tolist()) & set(torch.cat(own).tolist())
    counts = labels[holdout].bincount(minlength=10)
    assert len(holdout) == 100
    assert counts.max() - counts.min() <= 1
    received = []
    for before, after in zip(own, DataSharing(share=0.3).local_data(own, holdout, seed=3), strict=True):
        assert torch.equal(after[: len(before)], before)
        extra = after[len(before) :].tolist()
        assert len(set(extra)) == len(extra) == 30
        assert set(extra) <= set(holdout.tolist())
        received.append(set(extra))
    assert len({frozenset(extra) for extra in received}) == 5
    other = DataSharing(share=0.3).local_data(own, holdout, seed=4)
    assert set(other[0][len(own[0]) :].tolist()) != received[0]


def test_a_draw_does_not_depend_on_the_other_clients():
    own, holdout = [torch.tensor([0]), torch.tensor([1, 2]), torch.tensor([3])], torch.arange(10, 30)
    both = DataSharing().local_data(own, holdout, seed=0)
    alone = DataSharing().local_data([NOTHING, own[1]], holdout, seed=0)
    assert torch.equal(both[1], alone[1])
    assert len(alone[0]) == 0


def test_clients_without_own_data_take_no_part():
    case = ragged()
    for record in case.run(DataSharing(share=1.0)):
        assert record.cohort.members == (0, 1, 3, 4)
        assert [len(result.local.data) for result in record.clients] == [32, 19, 45, 13]


def test_the_received_samples_are_the_same_in_every_round():
    case = ragged()
    first, *later = case.run(DataSharing(), fraction=0.5, rounds=6)
    seen = {result.local.client: result.local.data.indices for result in first.clients}
    again = 0
    for record in later:
        for result in record.clients:
            again += result.local.client in seen
            before = seen.setdefault(result.local.client, result.local.data.indices)
            assert torch.equal(before, result.local.data.indices)
    assert again > 2


def test_weights_may_include_the_received_samples():
    case = ragged()
    sizes = {0: 20 + 6, 1: 7 + 6, 3: 33 + 6, 4: 1 + 6}
    weights = {n: size / sum(sizes.values()) for n, size in sizes.items()}
    expected = reference(case, 6, weights, references.initial(case))
    ours = final(case.run(DataSharing(weight_includes_shared=True)))
    assert largest_difference(ours, expected) < 1e-13
    assert largest_difference(ours, final(case.run(DataSharing()))) > 1e-4


def test_uniform_weights_stay_uniform():
    case = ragged()
    ours = final(case.run(DataSharing(weight_includes_shared=True), weighting="uniform"))
    assert equal_bits(ours, final(case.run(DataSharing(), weighting="uniform")))
    assert largest_difference(ours, reference(case, 6, dict.fromkeys((0, 1, 3, 4), 0.25), references.initial(case))) < (
        1e-13
    )


def test_including_nothing_is_fedavg():
    case = ragged(torch.float32)
    ours = final(case.run(DataSharing(share=0.0, weight_includes_shared=True), fraction=0.5))
    assert equal_bits(ours, final(case.run(FedAvg(), fraction=0.5)))


def warm_start(case, epochs, lr, batch_size):
    """SGD on the held-out data alone, with the batches of round 0 of the server, whose number is -1."""
    x = references.initial(case)
    for epoch in range(epochs):
        order = torch.randperm(len(case.holdout), generator=streams.generator(case.seed, "batches", 0, -1, epoch))
        x = descend(case, x, torch.split(case.holdout[order], batch_size), lr)
    return x


def test_the_warm_up_is_training_on_the_held_out_data():
    case = ragged()
    method = DataSharing(warmup_epochs=3, warmup_lr=0.2, warmup_batch_size=5)
    records = case.run(method)
    start = warm_start(case, 3, 0.2, 5)
    assert largest_difference(records[0].before.state.params, start) < 1e-14
    expected = reference(case, 6, references.weights(case, references.members(case)), start)
    assert largest_difference(final(records), expected) < 1e-13
    assert equal_bits(case.task().initial.params, references.initial(case))


def test_the_warm_up_is_not_repeated_on_resume():
    case = ragged()
    method = DataSharing(warmup_epochs=3, warmup_lr=0.2)
    records = case.run(method)
    rest = case.go_on(method, resume=records[0].after)
    assert equal_bits(final(rest), final(records))


def test_a_warm_up_without_sharing():
    case = ragged()
    method = DataSharing(share=0.0, warmup_epochs=1, warmup_lr=0.2)
    expected = reference(
        case, 0, references.weights(case, references.members(case)), warm_start(case, 1, 0.2, len(case.holdout))
    )
    assert largest_difference(final(case.run(method)), expected) < 1e-13


def test_a_warm_up_that_diverges_is_named():
    with pytest.raises(Diverged, match="round 0"):
        ragged().run(DataSharing(warmup_epochs=3, warmup_lr=1e308, warmup_batch_size=2))


def test_a_warm_up_without_data_is_refused():
    with pytest.raises(UserError, match=r"warmup_epochs 2 needs data .* there are none; set data\.holdout"):
        ragged()._replace(holdout=NOTHING).run(DataSharing(warmup_epochs=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 1.1}, r"method\.share must lie in \[0, 1\], got 1\.1"),
        ({"share": -0.1}, r"method\.share must lie in \[0, 1\], got -0\.1"),
        ({"warmup_epochs": -1}, r"method\.warmup_epochs must be >= 0, got -1"),
        ({"warmup_lr": float("nan")}, r"method\.warmup_lr must be a finite number >= 0, got nan"),
        ({"warmup_batch_size": 0}, r"method\.warmup_batch_size must be at least 1, got 0"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        DataSharing(**options)


def test_stragglers_are_dropped_or_kept_as_in_fedavg():
    case = ragged()._replace(holdout=NOTHING)
    changes = {"straggler_fraction": 0.5, "epochs": 4}
    drop, keep = (final(case.run(DataSharing(stragglers=choice), **changes)) for choice in ("drop", "keep"))
    assert equal_bits(keep, final(case.run(FedAvg(stragglers="keep"), **changes)))
    assert equal_bits(drop, final(case.run(FedAvg(stragglers="drop"), **changes)))
    assert not equal_bits(drop, keep)


def diagnoses(case, method, **changes):
    return [
        method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
        for record in case.run(method, **changes)
    ]


def label_distances(case, clients, population):
    def frequencies(indices):
        return torch.stack([(case.dataset.train_y[indices] == c).double().mean() for c in range(3)])

    return [float((frequencies(i) - frequencies(population)).abs().sum()) for i in clients if len(i)]


def test_label_distances_are_those_of_the_definition():
    case = ragged()
    population = torch.cat(case.clients)
    for numbers in diagnoses(case, DataSharing()):
        assert numbers["emd_own"] == pytest.approx(label_distances(case, case.clients, population), abs=1e-14)
        bigger = enlarged(case, 6).clients
        assert numbers["emd"] == pytest.approx(label_distances(case, bigger, population), abs=1e-14)


def test_held_out_data_like_the_population_shrink_the_label_distance_exactly():
    case = ragged(sizes=(9, 3, 18, 0))
    # Ten of each class among the clients, four of each class held out.
    labels = torch.tensor([0] * 9 + [1] * 3 + [0] + [1] * 7 + [2] * 10 + [0, 1, 2] * 4)
    everyone = torch.arange(42)
    case = case._replace(
        dataset=replace(case.dataset, train_y=labels),
        clients=[everyone[:9], everyone[9:12], everyone[12:30], NOTHING],
        holdout=everyone[30:],
    )
    numbers = diagnoses(case, DataSharing(share=1.0), rounds=1)[0]
    assert min(numbers["emd_own"]) > 0.1
    for before, after, size in zip(numbers["emd_own"], numbers["emd"], (9, 3, 18), strict=True):
        assert after == pytest.approx(before * size / (size + 12), rel=1e-12)


@pytest.mark.parametrize("pixels", ["bytes", "floats"])
def test_traffic_of_the_rounds_is_that_of_fedavg_and_the_samples_are_counted_once(pixels):
    case = ragged()
    if pixels == "bytes":
        both = {name: getattr(case.dataset, name) * 20 + 128 for name in ("train_x", "test_x")}
        dataset = replace(case.dataset, **{name: x.clamp(0, 255).to(torch.uint8) for name, x in both.items()})
        case = case._replace(dataset=dataset)
    size = case.task().num_params
    method = DataSharing(warmup_epochs=2)
    for record in case.run(method, fraction=0.5):
        assert len(record.cohort.members) == 2
        assert record.bytes_down == record.bytes_up == 4 * size * 2
    first, *later = diagnoses(case, method, fraction=0.5)
    # Four clients have data, also those that wait; each receives six samples of five numbers and a label.
    assert first["shared_bytes"] == 4 * 6 * (5 * (1 if pixels == "bytes" else 4) + 4)
    assert first["warmup_gradient_evaluations"] == 2 * 12
    assert not any("shared_bytes" in numbers or "warmup_gradient_evaluations" in numbers for numbers in later)


def test_received_samples_count_as_gradient_evaluations():
    case = ragged()
    assert case.run(DataSharing(), rounds=1)[0].gradient_evaluations == 2 * (20 + 7 + 33 + 1 + 4 * 6)
