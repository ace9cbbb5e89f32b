"""Checks what a quickstart left: python .ci/check_quickstart.py FOLDER LAST_LINE."""

import json
import math
import pathlib
import sys

folder, last = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
summary = json.loads((folder / 'summary.json').read_text())
assert list(summary['schemes']) == ['pre', 'lns'] and summary['seconds'] > 0
for name, found in summary['schemes'].items():
  L = found['layers']
  assert not found['diverged'] and math.isfinite(found['val_loss'])
  assert found['val_perplexity'] == math.exp(found['val_loss']) and last[f'{name}_val_loss'] == found['val_loss']
  assert len(found['variance']) == L + 1 and len(found['layer_drop']) == L and len(found['angular']) == L
  assert [sum(v is not None for v in row) for row in found['angular']] == list(range(L, 0, -1))
  for file in ('run_info.json', 'metrics.jsonl', 'result.json', 'depth.json'):
    assert (folder / name / file).stat().st_size
assert summary['schemes']['pre']['params'] == summary['schemes']['lns']['params']
assert (folder / 'report.html').read_text().lower().startswith('<!doctype html>')
print(f"quickstart outputs are whole, {summary['seconds']:.0f} s")
