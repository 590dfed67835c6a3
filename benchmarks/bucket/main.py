"""Four sites that reach an S3 server and no other host train digits, and one of them is killed on the way.

    export POLYTEMPO_NETLAB=…/netlab.sh      # see compression/lab.py for the script; needs root, moto, flask and s3fs
    python benchmarks/bucket/main.py [--mbit 100] [--strategy 'diloco(period=16)'] [--kill 40]

Host 0 has moto's server. On each other host routes to the other sites are made unreachable, and a process joins the
bucket. Site 2 kills itself in step `--kill` (0: none does) and is started again. The ledger in the bucket is counted at
the end. Each step waits for `--step-ms`, which stands for a larger model.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import polytempo as pt
from polytempo.cli.look.bucket_round import bucket_round
from polytempo.jobs.digits import job
from polytempo.worlds.object_store.object_store import ObjectStore
from polytempo.worlds.object_store.objects import objects_at
from polytempo.worlds.object_store.rounds import history
from polytempo.worlds.object_store.store_log import logged

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "compression"))

from lab import lab, on_every_host

SITES, KILLED, EPOCHS, PORT = 4, 2, 15, 5000
WAIT_S, TIMEOUT_S, RUN_S = 6.0, 60.0, 200.0
URL = "s3://runs/digits"
HERE = str(Path(__file__).resolve())


def main() -> None:
    """Make the hosts, run the sites, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", type=Path, default=os.environ.get("POLYTEMPO_NETLAB"), help="the script of the lab")
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--strategy", default="diloco(period=16)")
    parser.add_argument("--kill", type=int, default=40)
    parser.add_argument("--step-ms", type=float, default=50.0)
    asked = parser.parse_args()
    if asked.lab is None:
        print("left out: name the script of a network of emulated hosts by --lab or POLYTEMPO_NETLAB")
        return
    with tempfile.TemporaryDirectory(prefix="polytempo-bucket-") as folder, lab(asked.lab, SITES + 1, asked.mbit):
        given = json.dumps({"folder": folder, "strategy": asked.strategy, "kill": asked.kill, "step_ms": asked.step_ms})
        on_every_host(asked.lab, SITES + 1, [sys.executable, HERE, "host", given], RUN_S)
        found = [json.loads((Path(folder) / f"site-{site}.json").read_text()) for site in range(SITES)]
        ledger = json.loads((Path(folder) / "ledger.json").read_text())
    cluster = f"bucket(mbit_per_s={asked.mbit}, latency_ms=0.05)"
    cost = bucket_round(pt.parse_strategy(asked.strategy), job.model(), SITES, cluster)["bucket"]
    heads = "accuracy | seconds | median s of a step with puts | puts | gets | sent | received | sites out of reach"
    print(f"| site | {heads} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for site, row in enumerate(found):
        sizes = f"{row['sent'] / 1e3:.0f} kB | {row['received'] / 1e3:.0f} kB"
        numbers = f"{row['accuracy']:.1%} | {row['seconds']:.1f} | {row['round_s']:.2f} | {row['puts']} | {row['gets']}"
        print(f"| {site} | {numbers} | {sizes} | {row['unreachable']} of {SITES - 1} |")
    print(
        f"{ledger['rounds']} rounds or pushes, {ledger['once']} samples of epochs once, {ledger['not once']} not;",
        end=" ",
    )
    print(f"rounds without a site: {ledger['lost']}; price of a round: {cost['seconds']:.3f} s, {cost['puts']} puts")


# ---------------------------------------------------------------------- on a host


def host(given: dict[str, Any]) -> None:
    """The store on host 0, a site on each other one."""
    rank, master = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    settings = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= settings | {"AWS_ENDPOINT_URL": f"http://{master}:{PORT}", "AWS_EC2_METADATA_DISABLED": "true"}
    folder = Path(given["folder"])
    if rank == 0:
        return serve(master, folder)
    alone = [f"{master.rpartition('.')[0]}.{other + 1}" for other in range(1, SITES + 1) if other != rank]
    for address in alone:
        subprocess.run(["ip", "route", "add", "unreachable", f"{address}/32"], check=True)
    given |= {"site": rank - 1, "unreachable": sum(map(is_unreachable, alone))}
    until((folder / "served").exists)
    for life in range(2):
        command = [sys.executable, HERE, "site", json.dumps(given | {"life": life})]
        done = subprocess.run(command, check=False)
        if done.returncode != -signal.SIGKILL:
            done.check_returncode()
            return


def is_unreachable(address: str) -> bool:
    """True if no connection to another site is possible: there is no route."""
    try:
        socket.create_connection((address, PORT), timeout=1.0).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return False


def until(condition: Any) -> None:
    """Wait until `condition()` holds."""
    ends_s = time.monotonic() + RUN_S
    while not condition():
        if time.monotonic() > ends_s:
            raise TimeoutError(str(condition))
        time.sleep(0.1)


def serve(master: str, folder: Path) -> None:
    """The S3 server until all sites are done, and then the ledger."""
    import s3fs

    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", master, "-p", str(PORT)], stderr=log)
        try:
            until(lambda: not is_closed(master))
            s3fs.S3FileSystem().mkdir("runs")
            (folder / "served").touch()
            until(lambda: all((folder / f"site-{site}.json").exists() for site in range(SITES)))
            (folder / "ledger.json").write_text(json.dumps(counted()))
        finally:
            server.kill()
            server.wait()


def is_closed(address: str) -> bool:
    """True while the server does not listen."""
    try:
        socket.create_connection((address, PORT), timeout=1.0).close()
    except OSError:
        return True
    return False


def counted() -> dict[str, Any]:
    """Count the times that rounds or pushes have each sample of each epoch."""
    store = ObjectStore(objects_at(URL), URL)
    rows = list(history(store))
    lines = [row["ledger"][str(member)] for row in rows for member in row["members"]]
    pushes = [entry["mine"] for entry in logged(store) if entry["kind"] == "push"]
    times: Counter[tuple[int, int]] = Counter()
    for line in lines or pushes:
        for epoch, start, stop in line["spans"]:
            times.update((epoch, place) for place in range(start, stop))
    whole = max(epoch for epoch, _ in times)  # the last steps of a run are in no round
    samples = len(pt.data.digits().train)
    once = sum(times[epoch, place] == 1 for epoch in range(whole) for place in range(samples))
    lost = [row["lost"] for row in rows if row["lost"]]
    return {"rounds": len(rows or pushes), "once": once, "not once": whole * samples - once, "lost": lost}


def site(given: dict[str, Any]) -> None:
    """One site's program."""
    torch.set_num_threads(1)
    digits, number = pt.data.digits(), given["site"]
    world = pt.join_bucket(URL, worker=number, workers=SITES, wait_s=WAIT_S, timeout_s=TIMEOUT_S)
    torch.manual_seed(number)
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr, momentum=0.9)
    handle = pt.attach(model, optimizer, given["strategy"])
    batches = pt.shard(digits.train, batch_size=job.batch_size)
    began_s, rounds_s, requests = time.monotonic(), [], world.rounds.store.requests
    while batches.epoch < EPOCHS:
        for x, y in batches:
            if number == KILLED and not given["life"] and handle.step == given["kill"] > 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(given["step_ms"] / 1e3)
            step_s, before = time.monotonic(), requests.puts
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if requests.puts > before:
                rounds_s.append(time.monotonic() - step_s)
    seconds = time.monotonic() - began_s
    world.leave()
    images, labels = digits.test.tensors
    found = {
        "accuracy": (model(images).argmax(dim=1) == labels).float().mean().item(),
        "seconds": seconds,
        "round_s": sorted(rounds_s)[len(rounds_s) // 2] if rounds_s else float("nan"),
        "puts": requests.puts,
        "gets": requests.gets,
        "sent": requests.sent_bytes,
        "received": requests.received_bytes,
        "unreachable": given["unreachable"],
    }
    (Path(given["folder"]) / f"site-{number}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["host"]:
        host(json.loads(sys.argv[2]))
    elif sys.argv[1:2] == ["site"]:
        site(json.loads(sys.argv[2]))
    else:
        main()
