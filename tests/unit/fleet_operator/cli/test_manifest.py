from __future__ import annotations

import pytest

from fleet_operator.cli.manifest import load_manifest


@pytest.mark.parametrize("written", ["2026-01-01", "2026-02-30", "2026-01-01T10:00:00Z"])
def test_a_date_without_quotes_is_text_as_it_is_to_kubectl(tmp_path, written):
    path = tmp_path / "fleetjob.yaml"
    path.write_text(f"env: [{{name: DAY, value: {written}}}]")
    assert load_manifest(path) == {"env": [{"name": "DAY", "value": written}]}
