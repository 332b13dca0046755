"""``run()``: turns a function and its options into a run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbddp import doors, folders, payload
from nbddp.kernel import earlier
from nbddp.kernel.options import RunOptions, takes_options
from nbddp.kernel.plan import Call, Plan, checked_call, make_plan
from nbddp.kernel.run import R, Run
from nbddp.kernel.site import LocalSite
from nbddp.launch.interface import Home, Site
from nbddp.panel import choose
from nbddp.payload import unpicklable
from nbddp.sinks.choose import choose_sinks
from nbddp.worker import script

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MAX_FORK_SERVER_FDS = 200  # fds of queues and shared tensors; multiprocessing's limit is 256 in all


@takes_options
def run(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[RunOptions],
) -> Run[R]:
    """Run ``fn(*args, **kwargs)`` on every rank: one fresh process per GPU, or on the CPU.

    The function, its classes and its data are sent by value, modules are imported on the ranks. A process
    group is ready when the function begins; a function that calls ``init_process_group`` gets the group that it
    asks for.

    Args:
        fn: called on every rank with the same arguments.
        nprocs: number of ranks; with several hosts, the number on each host, or a mapping from host to number.
            Default: all visible GPUs, else 2 on the CPU.
        device: ``"cuda"``, ``"cpu"`` or another accelerator of torch. Default: GPUs if there are any.
        gpus: which GPUs, by number; one rank each. With ``backend="gloo"`` ranks may share one: ``gpus=[0, 0]``. Their
            device is :func:`nbddp.device`, and not ``cuda:<LOCAL_RANK>``.
        backend: the process group's backend. Default: ``"nccl"`` on CUDA, ``"gloo"`` on the CPU.
        init: False: no process group, only torchrun's environment variables.
        seed: seeds python, numpy and torch on each rank with ``seed + rank``.
        deterministic: sets torch's deterministic algorithms and cuDNN flags.
        env: environment variables for the ranks, in addition to the notebook's current ones.
        timeout: wall time of the whole run, in seconds. Default: no limit.
        pg_timeout: timeout of each collective, in seconds. Default: torch's.
        max_restarts: how many times all ranks start again after a failure.
        stall_after: after this many seconds without a logged metric or output the panel shows where each rank is.
            None: never.
        stop_on_nan: True: end the run as soon as a rank logs NaN (an infinity does not end it). A restart would only
            repeat it, so there is none.
        wait: False: return at once, the run goes on in the background.
        show: False: show nothing while it runs. ``"widget"``, ``"picture"`` or ``"text"``: this view, instead of the
            one that fits the front end. The environment variable ``NBDDP_PANEL`` does the same for all runs.
        name: the run's name. Default: the function's.
        start_method: ``"forkserver"`` (default where there is one) or ``"spawn"``.
        hosts: names that ``ssh`` accepts, in the order of the ranks (``"localhost"``: this machine); ``"slurm"``: the
            nodes of this allocation; or an open :func:`nbddp.cluster`.
        min_hosts: after the loss of a host, a restart needs this many hosts. Default: all.
        grow: True: when a lost host is back, all ranks start again from the next snapshot, on all hosts that are
            there. This is not one of the ``max_restarts``. Default: it takes part from the next restart on.
        keep_children: True: a process that a rank starts in a session or process group of its own (a daemon, a
            tracking server) survives the rank; the ranks are then started by ``"spawn"``. Default: every process that
            a rank has started ends with it.
        oversubscribe: True: allow more than 16 ranks per CPU core (and more than 64).
        to: where the metrics go beside ``history``, while the run goes on: a ``SummaryWriter``, a run of
            ``wandb.init()`` or ``mlflow.start_run()``, an object with ``log_metrics(metrics, step)``, a function
            ``f(step, metrics)``, ``"csv:PATH"``, ``"jsonl:PATH"`` or ``"tensorboard:FOLDER"``; or a list of these. The
            notebook kernel writes them, so they get one run however many ranks there are. Default: nowhere.
        listen: True: what rank 0 logs with TensorBoard's ``SummaryWriter``, W&B and other libraries is in ``history``,
            too, as if :func:`nbddp.log` had logged it.
        pdb: True: after an exception, the debugger opens in the failing rank's frames, before the cell raises the
            error. Default: as ``%pdb`` says.

    Returns:
        The run, finished unless ``wait=False``; its ``value`` is what rank 0 returned.

    Raises:
        LaunchError: the arguments cannot work, or a rank ended before it was ready.
        PayloadError: an object cannot be sent to the ranks; names the variable.
        RankError: the function raised on a rank; its exception is the ``cause``.
        RankDied: a rank ended by a signal or by ``os._exit``. RunTimeout: ``timeout`` is over.
        HostLost: the connection to a host was lost. NanLogged: a rank logged NaN and ``stop_on_nan`` is true.
        KeyboardInterrupt: the cell was interrupted; the ranks have ended.
    """
    call = checked_call(fn, args, kwargs, options["name"])
    plan, site = plan_run(call.name, options)
    return launch(plan, site, call, options)


def plan_run(name: str, options: RunOptions, **planned: Any) -> tuple[Plan, Home]:
    """Return a run's plan and the site of its ranks, after a login to its hosts, if any; ``planned`` are its fields.

    Raises:
        LaunchError: the options cannot work, or a host cannot be used.
    """

    def plan_for(devices: Mapping[str, Mapping[str, int]] | None) -> Plan:
        return dataclasses.replace(make_plan(name, options, devices=devices), **planned)

    if options["hosts"] is None:
        plan = plan_for(None)
        return plan, LocalSite(plan)
    remote: tuple[Plan, Home] = doors.open_remote(options["hosts"], plan_for)
    return remote


def launch(plan: Plan, site: Site, call: Call, options: RunOptions, *, remember: bool = True) -> Run[Any]:
    """Pickle the call, start the run, and unless ``wait=False`` wait for the end. Raises the errors of :func:`run`.

    Args:
        remember: False: it is not a run of the user's, and ``last_run()`` and ``runs()`` leave it out.
    """
    with contextlib.ExitStack() as unless_begun:
        unless_begun.callback(site.close)
        choose.check(options["show"])
        sinks = choose_sinks(options["to"])
        pickled = _pickle_call(plan, call)
        if len(pickled.packed.inherited) > _MAX_FORK_SERVER_FDS:
            plan = dataclasses.replace(plan, start_method="spawn")
        started: Run[Any] = Run(
            plan, pickled, site, blocking=options["wait"], sinks=sinks, subject=earlier.subject_of(call)
        )
        unless_begun.pop_all()
    started.begin(show=options["show"], remember=remember)
    return started


def _pickle_call(plan: Plan, call: Call) -> payload.Pickled:
    """Pickle the call, without those of the optional arguments that cannot be pickled."""
    try:
        return payload.prepare(
            (call.fn, call.args, call.kwargs),
            sent=plan.sent,
            inheriting=plan.inherits,
            folders=folders.without_installed(folders.users(plan.sys_path)) if plan.shares else (),
            texts=script.texts(call.args),
        )
    except Exception as error:  # whatever a user's __reduce__ raises
        left_out = {name for name in plan.optional if not _can_be_pickled(call.kwargs[name], plan)}
        if left_out:
            kept = {name: value for name, value in call.kwargs.items() if name not in left_out}
            return _pickle_call(dataclasses.replace(plan, optional=frozenset()), dataclasses.replace(call, kwargs=kept))
        named = {call.name: call.fn, **{f"args[{i}]": arg for i, arg in enumerate(call.args)}, **call.kwargs}
        raise unpicklable.explain(named, error, what=f"cannot send {call.name} to the ranks") from None


def _can_be_pickled(value: Any, plan: Plan) -> bool:
    try:
        payload.probe(value, inheriting=plan.inherits)
    except Exception:  # whatever a user's __reduce__ raises
        return False
    return True
