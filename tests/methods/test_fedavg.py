import torch

from fl_lightning.methods.fedavg import FedAvg
from tests.support import references
from tests.support.cases import equal_bits, final, largest_difference, ragged


def brute_force(case, rounds):
    """FedAvg with plain loops: sum p_n theta_n over locally trained models."""
    server = references.initial(case)
    members = references.members(case)
    share = references.weights(case, members)
    for round in range(1, rounds + 1):
        total = {name: torch.zeros_like(value) for name, value in server.items()}
        for n in members:
            theta = server
            for batch in references.batches(case, n, round):
                slope = references.gradient(case, theta, batch)
                theta = {name: value - case.training.lr * slope[name] for name, value in theta.items()}
            total = {name: total[name] + share[n] * theta[name] for name in total}
        server = total
    return server


def test_equals_brute_force():
    case = ragged()
    assert largest_difference(final(case.run(FedAvg())), brute_force(case, 3)) < 1e-13


def test_one_client_is_plain_sgd_to_the_bit():
    case = ragged(dtype=torch.float32)
    case = case._replace(clients=[torch.cat(case.clients)])
    model = case.task().model
    for round in (1, 2, 3):
        for batch in references.batches(case, 0, round):
            x, y = case.dataset.train_x[batch], case.dataset.train_y[batch]
            slopes = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), y), list(model.parameters()))
            with torch.no_grad():
                for parameter, slope in zip(model.parameters(), slopes, strict=True):
                    parameter.add_(slope, alpha=-case.training.lr)
    assert equal_bits(final(case.run(FedAvg())), dict(model.named_parameters()))


def test_identical_clients_give_the_same_model():
    case = ragged()
    twin = case._replace(clients=[case.clients[0]] * 2, training=case.training.__class__(lr=0.1, batch_size=None))
    record = twin.run(FedAvg(), rounds=1)[0]
    assert largest_difference(record.after.state.params, record.clients[0].local.params) < 1e-15


def test_learning_rate_zero_changes_no_bit():
    case = ragged(dtype=torch.float32)
    assert equal_bits(final(case.run(FedAvg(), lr=0.0)), case.task().initial.params)


def test_weights_are_renormalised_over_the_cohort():
    case = ragged()
    for record in case.run(FedAvg(), cohort=2):
        sizes = [len(case.clients[n]) for n in record.cohort.members]
        assert record.cohort.weights == tuple(size / sum(sizes) for size in sizes)
        expected = {
            name: sum(w * c.local.params[name] for w, c in zip(record.cohort.weights, record.clients, strict=True))
            for name in record.before.state.params
        }
        assert largest_difference(record.after.state.params, expected) < 1e-14


def test_uniform_weighting_counts_clients():
    record = ragged().run(FedAvg(), weighting="uniform", rounds=1)[0]
    assert record.cohort.weights == (0.25,) * 4


def test_traffic_is_one_model_each_way():
    case = ragged()
    record = case.run(FedAvg(), rounds=1)[0]
    assert record.bytes_down == record.bytes_up == 4 * case.task().num_params * 4
