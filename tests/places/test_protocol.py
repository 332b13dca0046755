"""Clients that cannot be run here, as far as their sources say what they do; docs/places.md names the sources."""

from __future__ import annotations

import uuid
from typing import Any

from tests.support import Notebook, out, wait_until_alone

CELL = "vscode-notebook-cell:/home/user/train.ipynb#W0sZmlsZQ%3D%3D"


class VsCode:
    """Applies updates of displays while the cell runs, drops binary buffers and sends nothing to a busy kernel."""

    def __init__(self, notebook: Notebook) -> None:
        self._client = notebook._client
        self.shown: dict[str, dict[str, Any]] = {}  # by display
        self.first: dict[str, Any] = {}

    def run(self, source: str) -> str:
        """Run a cell; returns its status."""
        message = self._client.session.msg(
            "execute_request",
            {"code": source, "silent": False, "store_history": True, "allow_stdin": True, "stop_on_error": False},
            metadata={"cellId": CELL},
        )
        message["header"]["msg_id"] = message["msg_id"] = str(uuid.uuid4())
        self._client.shell_channel.send(message)
        while True:
            received = self._client.get_iopub_msg(timeout=60)
            kind, content = received["msg_type"], received["content"]
            if received["parent_header"].get("msg_id") != message["msg_id"]:
                continue
            if kind in ("display_data", "update_display_data"):
                self.first = self.first or content["data"]
                self.shown[content["transient"]["display_id"]] = content["data"]
            if kind == "status" and content["execution_state"] == "idle":
                break
        while (reply := self._client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != message["msg_id"]:
            pass
        return str(reply["content"]["status"])


def test_vs_code_has_a_picture_beside_the_widget_and_in_its_place_at_the_end(notebook: Notebook) -> None:
    notebook.ok("%load_ext nbddp\nimport nbddp.panel.widget")  # which takes longer than a short run
    page = VsCode(notebook)
    logs = "for i in range(50):\n    nbddp.log(loss=i)"
    assert page.run(f"%%ddp -n 2 --device cpu\nimport time; time.sleep(1)\n{logs}") == "ok"
    assert set(page.first) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    assert "before the run" in page.first["text/html"]
    (last,) = page.shown.values()
    assert set(last) == {"text/html", "text/plain"}
    assert "Finished" in last["text/html"]
    assert page.run("%%ddp -n 2 --device cpu\n1 / 0") == "error"


def test_vs_codes_interrupt_of_all_processes_stops_the_run(notebook: Notebook) -> None:
    notebook.ok("%load_ext nbddp")
    for body in ("time.sleep(60)", "nbddp.barrier() if rank else time.sleep(60)"):
        cell = notebook.begin(f"%%ddp -n 2 --device cpu\nimport time\nprint('begun', flush=True)\n{body}")
        notebook.shown_so_far(cell, "begun")
        notebook.interrupt("tree")
        reply = notebook.end_of(cell)
        assert (reply.status, reply.ename) == ("error", "KeyboardInterrupt")
        assert reply.seconds < 10
        wait_until_alone(notebook.pid)
        assert out(notebook.ok("%%ddp -n 2 --device cpu\nrank + 40")) == "40"
