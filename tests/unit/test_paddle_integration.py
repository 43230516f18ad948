"""Calls of FastDeploy's former transfer process that the Paddle integration refuses."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")

from fdcache.errors import UnsupportedCallError
from fdcache.integrations import paddle as integration


@pytest.mark.parametrize("name", ["set_data_ipc", "share_external_data", "unset_data_ipc"])
def test_sharing_planes_over_ipc_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(UnsupportedCallError, match="register_kv_cache"):
        getattr(integration, name)(object(), "planes")
