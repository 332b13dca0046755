"""The earlier run of the same cell."""

from tests.support import Notebook

_CELL = "%%ddp -n 2 --device cpu\nimport nbddp\nnbddp.log(x=1.0)"


def test_a_cell_is_compared_with_itself_where_the_page_tells_which_it_is(own_notebook: Notebook) -> None:
    own_notebook.ok("%load_ext nbddp")
    client = own_notebook._client

    def logs(cell_id: str) -> str:
        message = client.session.msg("execute_request", {"code": _CELL, "silent": False, "store_history": True})
        message["metadata"]["cellId"] = cell_id
        client.shell_channel.send(message)
        own_notebook.end_of(message["header"]["msg_id"])
        return own_notebook.ok("print(nbddp.last_run()._before)").shown

    assert logs("a") == logs("b") == "None\n"
    assert logs("a") == "History(x: 1 point)\n"
