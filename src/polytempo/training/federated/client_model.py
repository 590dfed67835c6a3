"""`client_model`: a client's own model, from the checkpoint of a run."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from polytempo.core.system.url_path import UrlPath
from polytempo.training.checkpoint.checkpoint_files import read_manifest, read_part
from polytempo.training.federated.client_states import clients_in
from polytempo.training.observe.whole_checkpoint import run_model


def client_model(path: str | Path | UrlPath, client: int) -> dict[str, Tensor]:
    """The server's model with the tensors that a client keeps, such as its head (`fed_rep`), by the model's names.

        net.load_state_dict(pt.training.client_model("runs/mine", client=17))

    `path`: as of `checkpoint_model`. For a client that never took part it is the server's model. Cost: reads all ranks'
    files. Errors: as of `checkpoint_model`.
    """
    found = run_model(path)
    for rank in range(len(read_manifest(found.folder).parts)):
        kept = clients_in(read_part(found.folder, rank)).get(client, {})
        if kept:
            return found.tensors | {name: tensor for name, tensor in kept.items() if name in found.tensors}
    return found.tensors
