"""The connector ``rdma``: conformance, runs, notifications, and peers that are stopped or killed in a read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fdcache.errors import TransferError, TransferNotFoundError
from fdcache.layout import KVLayout
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.conformance import OpenPeer, PeerPlanes, TransferConformance, transfer_layout
from fdcache.transfer.connector import ReadOrder, ReadOutcome
from fdcache.transfer.factory import require_connector
from fdcache.transfer.rdma import RdmaConnector, find_nixl

RDMA = PeerSettings(connector="rdma", ring=4 << 20)


@pytest.fixture(scope="module", autouse=True)
def nixl() -> None:
    try:
        find_nixl()
    except TransferNotFoundError:
        pytest.skip("NIXL is not installed")


class TestRdma(TransferConformance):
    @pytest.fixture
    def open_peer(self, tmp_path: Path) -> OpenPeer:
        def open_one(layout: KVLayout, num_blocks: int) -> tuple[PeerPlanes, RdmaConnector]:
            planes = PeerPlanes(layout, num_blocks, tmp_path)
            return planes, RdmaConnector(planes.context(RDMA))

        return open_one
