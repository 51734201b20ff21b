"""Whether workers could work on every node, before anything is trained: a plug-in or a package may differ there.

On one node the first worker that is ready speaks for all. On several the problem is unpacked once on each of them; a
worker on a node that joins later looks by itself when it starts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fl_lightning.cluster.connection import Resources, slots
from fl_lightning.errors import UserError
from fl_lightning.system import activity, interrupts
from fl_lightning.workers.code import Code
from fl_lightning.workers.worker import Failure, Worker

# Seconds that a node has to answer; one that is slower is looked at when a worker starts there.
PATIENCE = 60.0
LOOK_EVERY = 0.5


def check_nodes(resources: Resources, problem: Sequence[Any], variables: Mapping[str, str]) -> None:
    """Refuse a problem that a node cannot use.

    Args:
        resources: Of a worker; nodes without room for any do not matter.
        problem: References to its parcels.
        variables: Of the environment, as the driver has them.

    Raises:
        UserError: If a node lacks something, or has something else.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = _nodes(resources)
    if len(nodes) < 2:
        return
    activity.wait(f"looking whether {len(nodes)} nodes have all that workers need")
    look = ray.remote(num_cpus=0, max_retries=0)(_look)
    waiting = {
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            problem, variables, Code.here()
        ): address
        for node, address in nodes.items()
    }
    for _ in range(round(PATIENCE / LOOK_EVERY)):
        come, _ = ray.wait(list(waiting), timeout=LOOK_EVERY)
        interrupts.check()
        for ref in come:
            _judge(ref, waiting.pop(ref))
        if not waiting:
            return


def _judge(ref: Any, address: str) -> None:
    """Raise what a node has found."""
    import ray

    try:
        answer: Failure | None = ray.get(ref)
    except ray.exceptions.RayTaskError as error:  # it has no such function, or no such package
        reason = str(error).strip().splitlines()[-1][:200]
        raise UserError(
            f"expected {Code.here()} on {address}, as where the run was started, got one that cannot start a worker "
            f"({reason}); install the same on all nodes (docs/cluster.md)"
        ) from None
    except ray.exceptions.RayError:  # the node is gone, or too busy to say
        return
    if answer is not None:
        raise answer.error


def _look(problem: Sequence[Any], variables: Mapping[str, str], code: Code) -> Failure | None:
    """What a worker would say here."""
    return Worker(on_gpu=False).prepare(problem, variables, code)


def _nodes(resources: Resources) -> dict[str, str]:
    """Where workers may start, by id, and their addresses."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    group = ray.util.get_current_placement_group()
    if group is not None:  # workers of a trial start nowhere else
        ours = set(ray.util.placement_group_table(group)["bundles_to_node_id"].values())
        nodes = [node for node in nodes if node["NodeID"] in ours]
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if slots([node], resources)}
