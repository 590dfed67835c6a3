"""Tables and pictures on a real S3 server, moto's, by s3fs, and on a web server: the samples of a local copy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import polytempo as pt
from command_output import asking
from integrations.test_store_on_s3 import Faulty, server
from polytempo.core.system.url_path import UrlPath

__all__ = ["server"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # botocore's and moto's own
asked = asking()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing of requests."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with `t.csv` and `pictures`."""
    data = tmp_path / "data"
    for number in range(5):
        for name, colour in (("red", (255, number, 0)), ("blue", (0, number, 255))):
            (data / "pictures" / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 7), colour).save(data / "pictures" / name / f"{number}.png")
    rows = "".join(f"{n % 7},{'red' if n % 3 else 'blue'},{'ab'[n % 2]}\n" for n in range(40))
    (data / "t.csv").write_text(f"size,colour,kind\n{rows}")
    return data


@pytest.fixture
def http(data: Path) -> Iterator[str]:
    serving = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(data)))
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}"
    serving.shutdown()
    serving.server_close()
    thread.join(60)


@pytest.fixture
def s3(data: Path, server: Faulty) -> str:
    url = f"s3://runs/{data.parent.name}"
    for file in [data / "t.csv", *(data / "pictures").rglob("*.png")]:
        UrlPath(f"{url}/{file.relative_to(data)}").write(file.read_bytes())
    return url


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_samples_are_those_of_a_copy(
    kind: str, data: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    url = request.getfixturevalue(kind)
    here, there = (pt.data.csv_classes(place, "kind") for place in (data / "t.csv", f"{url}/t.csv"))
    assert all(map(torch.equal, here.train.tensors, there.train.tensors))
    pictures, others = (pt.data.images(place, size=4)[0] for place in (data / "pictures", f"{url}/pictures"))
    assert [label for _, label in pictures.files] == [label for _, label in others.files]
    assert all(torch.equal(pictures[number][0], others[number][0]) for number in range(len(pictures)))
    for name in ("t.csv", "pictures"):
        made = data / f"{name}.toml"
        asked(capsys, "init", f"{url}/{name}", "--out", str(made), "--batch-size", "4")
        assert pt.simulate(str(made), "sync_sgd", 2, steps=2).steps == 2
        assert f"{url}/{name}" in made.read_text()


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_a_table_that_is_not_there_is_named(kind: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(kind)
    with pytest.raises(OSError, match=f"{url}/none.csv"):
        pt.data.csv_classes(f"{url}/none.csv", "kind")
