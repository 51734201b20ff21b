"""Presets: methods that are another method with other defaults, under the name that they have in the literature.

A preset changes defaults and nothing else. What makes up its name has a type with that one value. `PRESETS` is the list
that discovery reads; an identity names the method that a preset is made of.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fl_lightning.methods.ep import EP
from fl_lightning.methods.fedopt import FedOpt
from fl_lightning.methods.fola import Fola
from fl_lightning.methods.fola_extended import FolaExtended


@dataclass(frozen=True)
class FedAvgM(FedOpt):
    """FedAvg with momentum at the server.

        u <- beta_1 u + sum_n p_n (x - y_n)        x <- x - eta_s u        y_n = SGD on L_n from x

    Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019.

    A preset of `fedopt`. In the long run the server steps 1 / (1 - beta_1) times as far as FedAvg, 10 times at
    0.9. FedExP's code compares with a FedAvgM(ExP) that has no momentum: a misspelt name skips the branch.

    Attributes:
        server_lr: Step size of the server (eta_s); with momentum 0, 1 takes the mean of the models.
    """

    display_name: ClassVar[str] = "FedAvgM"

    optimiser: Literal["sgd"] = "sgd"
    server_lr: float = 1.0


@dataclass(frozen=True)
class FedAdagrad(FedOpt):
    """FedAvg whose server steps with Adagrad: a step size for every parameter, which only shrinks.

        Delta = sum_n p_n (y_n - x)        v <- v + Delta^2        x <- x + eta_s Delta / (sqrt(v) + tau)

    Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021.

    A preset of `fedopt`: no momentum, and squares that only grow, so that steps shrink from round to round.
    """

    display_name: ClassVar[str] = "FedAdagrad"

    optimiser: Literal["adagrad"] = "adagrad"
    server_momentum: float = 0.0


@dataclass(frozen=True)
class FedAdam(FedOpt):
    """FedAvg whose server steps with Adam: a step size for every parameter.

        Delta = sum_n p_n (y_n - x)        m <- beta_1 m + (1 - beta_1) Delta
        v <- beta_2 v + (1 - beta_2) Delta^2        x <- x + eta_s m / (sqrt(v) + tau)

    Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021.

    A preset of `fedopt`, which says where published codes differ.
    """

    display_name: ClassVar[str] = "FedAdam"

    optimiser: Literal["adam"] = "adam"


@dataclass(frozen=True)
class FedYogi(FedOpt):
    """FedAvg whose server steps with Yogi: as Adam, with step sizes that grow slowly.

        Delta = sum_n p_n (y_n - x)        m <- beta_1 m + (1 - beta_1) Delta
        v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2)        x <- x + eta_s m / (sqrt(v) + tau)

    Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021.

    A preset of `fedopt`. Unlike Adam's, the mean square changes by at most (1 - beta_2) Delta^2 in a round, so
    that small updates after large ones do not raise the step size at once.
    """

    display_name: ClassVar[str] = "FedYogi"

    optimiser: Literal["yogi"] = "yogi"


@dataclass(frozen=True)
class FedEP(EP):
    """Expectation propagation with one curvature for all parameters of a client.

        H_n = scale m_n I

    Guo, Greengard, Wang, Gelman, Kim, Xing: Federated Learning as Variational Inference: A Scalable Expectation
    Propagation Approach, ICLR 2023.

    A preset of `ep`, which says where published codes differ.
    """

    display_name: ClassVar[str] = "FedEP"

    inference: Literal["identity"] = "identity"


@dataclass(frozen=True)
class FedSEP(EP):
    """Stochastic expectation propagation: a share of the posterior stands for every client's factor.

        t_n = (q_S / prior)^pi_n

    Guo, Greengard, Wang, Gelman, Kim, Xing: Federated Learning as Variational Inference: A Scalable Expectation
    Propagation Approach, ICLR 2023.

    A preset of `ep`, which says where published codes differ.
    """

    display_name: ClassVar[str] = "FedSEP"

    memory: Literal["sep"] = "sep"


@dataclass(frozen=True)
class FedLapCov(EP):
    """Expectation propagation with the Laplace approximation where a client's training ends.

        H_n = sum_i g_i^2 at y_n        over the client's samples

    Swaroop, Khan, Doshi-Velez: Connecting Federated ADMM to Bayes, ICLR 2025.

    A preset of `ep`, which says where published codes differ.
    """

    display_name: ClassVar[str] = "FedLap-Cov"

    inference: Literal["laplace"] = "laplace"
    curvature: Literal["end"] = "end"


@dataclass(frozen=True)
class PVI(EP):
    """Partitioned variational inference: every client trains a Gaussian against all others' by IVON.

        q_n = argmin (m_n / T) E_q[L_n] + KL(q || cavity)

    Ashman, Bui, Nguyen, Markou, Weller, Swaroop, Turner: Partitioned Variational Inference, 2022.

    A preset of `ep`, which says where published codes differ.
    """

    display_name: ClassVar[str] = "PVI"

    inference: Literal["vi"] = "vi"
    temperature: float = 0.1


@dataclass(frozen=True)
class Virtual(EP):
    """Variational federated learning: Gaussian factors of all clients, trained variationally, with a unit prior.

        q_n = argmin (m_n / T) E_q[L_n] + KL(q || cavity)        prior N(x_0, 1)

    Corinzia, Beuret, Buhmann: Variational Federated Multi-Task Learning, 2019.

    The shared part of the method alone: no private network of a client. What differs from the published code: clients
    train by IVON instead of Bayes by backprop; T stands for the weight of the KL term; factors add up without weights
    pi_n, and each moves by 1 / clients of the round. Errors of the code that are not emulated: its KL uses one
    Gaussian's precision for the other's mean; its damping is 1 - server_lr, so that a step is s (1 - s) and none at s =
    1; with server_lr other than 1 its server differs from the product of the factors; the scale of its prior is ignored
    by its natural layers; precisions below 1e-6 become 0 and are divided by.

    A preset of `ep`, which says where published codes differ.
    """

    display_name: ClassVar[str] = "VIRTUAL"

    inference: Literal["vi"] = "vi"
    temperature: float = 0.1
    prior: float = 1.0


@dataclass(frozen=True)
class FisherMerging(Fola):
    """One-shot merging: parameters weighted by the clients' diagonal Fisher at the end of training.

        F_n  = (1/m_n) sum_i g_i^2                                      g_i: gradient of the loss of sample i at y_n
        mu_S <- sum_n p_n (F_n + gamma) y_n / sum_n p_n (F_n + gamma)        y_n = SGD on L_n from mu_S

    Matena, Raffel: Merging Models with Fisher-Weighted Averaging, NeurIPS 2022.

    A preset of `fola`: the product of Gaussians whose precision is the diagonal Fisher of the client's own
    samples at the end of training, without prior loss and without memory of earlier rounds. It is a one-shot method;
    more rounds are the same again.

    Where the original and codes of rivals differ:
    - the original weighs models by hand-tuned coefficients in place of p_n, and has a floor of 1e-6 for the Fisher in
      place of gamma, which here is relative to its mean;
    - the labels of g_i are those of the data (empirical Fisher); the original draws them from the model's predictions,
      or takes the expectation over them;
    - FedFisher's code compares with it outside the loop over rounds, with one partition for all seeds.
    """

    display_name: ClassVar[str] = "Fisher merging"

    curvature: Literal["offline"] = "offline"
    fisher: Literal["per_sample"] = "per_sample"
    strength: float = 0.0


@dataclass(frozen=True)
class FolaCode(FolaExtended):
    """FOLA as its published code computes it, with an inert prior loss and damping that shrinks the model.

        F_n       <- sum over epochs and batches of (b_t / m_n) g_t^2
        Lambda_n   = F_n + Lambda_S
        mu_S      <- sum_n p_n Lambda_n mu_n / (sum_n p_n Lambda_n + gamma)

    A preset of `fola_extended`, for comparisons. The published code and the paper disagree:
    - the code builds the prior loss from detached tensors, so that lambda changes no gradient;
    - it sums the Fisher over epochs, where the paper's equations have the mean;
    - it adds the precisions of all rounds, and divides by r in the prior loss;
    - it damps the denominator of the product alone, which shrinks every weight in every round, by an absolute gamma.
    """

    display_name: ClassVar[str] = "FOLA as published"
    recorded_as: ClassVar[str] = "fola"

    damping: float = 1e-5
    damping_mode: Literal["relative", "absolute"] = "absolute"
    damping_place: Literal["both", "denominator"] = "denominator"
    normalisation: Literal["mean", "sum_epochs", "sum_steps"] = "sum_epochs"
    round_scaling: Literal["paper", "code"] = "code"
    detached_prior: bool = True


@dataclass(frozen=True)
class RegMean(FolaExtended):
    """One-shot merging: layers weighted by the second moments of their inputs, without labels.

        A_n = (1/m_n) sum_i a_i a_i^T                                   a_i: input of the layer, with a one appended
        M_S <- [sum_n p_n M_n (A_n + gamma I)] [sum_n p_n (A_n + gamma I)]^-1

    Jin, Ren, Preotiuc-Pietro, Cheng: Dataless Knowledge Fusion by Merging Weights of Language Models, ICLR 2023.

    A preset of `fola_extended`: the product of Gaussians whose precision is the second moment of the layers' inputs, at
    the end of training, without prior loss and memory. The original shrinks the entries of A_n beside the diagonal by a
    factor of 0.9 instead of damping it. A_n of the first layer is made of raw inputs (`first_layer average` does not
    send it).
    """

    display_name: ClassVar[str] = "RegMean"

    curvature: Literal["offline"] = "offline"
    curvature_form: Literal["inputs"] = "inputs"
    strength: float = 0.0


@dataclass(frozen=True)
class FedFisher(FolaExtended):
    """One-shot merging: layers weighted by Kronecker factors of their Fisher information.

        M_S <- argmin_M sum_n p_n <M - M_n, G_n (M - M_n) A_n>

    Jhunjhunwala, Wang, Joshi: FedFisher: Leveraging Fisher Information for One-Shot Federated Learning, AISTATS 2024.

    A preset of `fola_extended`: Kronecker factors G_n of gradients and A_n of inputs at the end of training, without
    prior loss and memory; the diagonal variant of the paper is `fisher_merging`. Solved exactly by conjugate gradients;
    the published code takes 2,000 steps of an Adam-like iteration and chooses among them by accuracy on 500 pooled
    training samples. It also aggregates outside the loop over rounds, so that more rounds train again from the same
    model, and has one partition for all seeds.
    """

    display_name: ClassVar[str] = "FedFisher"

    curvature: Literal["offline"] = "offline"
    curvature_form: Literal["kron"] = "kron"
    strength: float = 0.0
    damping: float = 0.1


@dataclass(frozen=True)
class FedLPA(FolaExtended):
    """One-shot merging: layer-wise posteriors of empirical Kronecker factors, each damped by the same number.

        M_S <- [sum_n p_n G_n]^-1 [sum_n p_n G_n M_n A_n] [sum_n p_n A_n]^-1

    Liu, Liu, Ye, Shen, Li, Jiang, Li: FedLPA: One-shot Federated Learning with Layer-Wise Posterior Aggregation,
    NeurIPS 2024.

    A preset of `fola_extended`, both factors damped by sqrt(0.001), without prior loss and memory; `solver cg` solves
    exactly instead of factor by factor. The published code reports the larger of two aggregators' test accuracies, of
    which the second takes 10,000 gradient steps and has not converged, and builds the prior of later rounds from
    detached tensors, without gradient.
    """

    display_name: ClassVar[str] = "FedLPA"

    curvature: Literal["offline"] = "offline"
    curvature_form: Literal["kron"] = "kron"
    strength: float = 0.0
    slopes: Literal["empirical"] = "empirical"
    solver: Literal["cg", "factored"] = "factored"
    damping: float = 0.0316
    damping_slopes: float | None = 0.0316
    damping_mode: Literal["absolute"] = "absolute"


PRESETS = {
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedep": FedEP,
    "fedsep": FedSEP,
    "fedlap_cov": FedLapCov,
    "pvi": PVI,
    "virtual": Virtual,
    "fisher_merging": FisherMerging,
    "fola_code": FolaCode,
    "regmean": RegMean,
    "fedfisher": FedFisher,
    "fedlpa": FedLPA,
}
