"""What every machine does: on those that the gate's tests leave out."""

import pytest

from nbddp.process.machine import LocalMachine
from tests.machines import PicklingMachine
from tests.test_machine import *  # noqa: F403
from tests.test_machine import Machines

MACHINES = {
    "here": lambda: [LocalMachine()],
    "behind a wire": lambda: [PicklingMachine()],
    "two behind wires": lambda: [PicklingMachine(), PicklingMachine()],
}


@pytest.fixture(params=MACHINES)
def machines(request: pytest.FixtureRequest) -> Machines:
    return MACHINES[request.param]
