"""The notebook runs from top to bottom, and is stored without outputs."""

import os
import pathlib

import nbclient
import nbformat
import pytest

PATH = pathlib.Path(__file__).parents[1] / 'colab' / 'quickstart.ipynb'


def _run(notebook, **env) -> list[str]:
  """Executes in a kernel of its own; returns the text of each code cell's outputs."""
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | {'JAX_PLATFORMS': 'cpu'} | env
  client = nbclient.NotebookClient(notebook, timeout=300, kernel_name='python3',
                                   resources={'metadata': {'path': str(PATH.parent)}})
  client.execute(env=env)
  code = [cell for cell in notebook.cells if cell.cell_type == 'code']
  text = lambda output: output.get('text', '') + ''.join(map(str, output.get('data', {}).values()))
  return [''.join(map(text, cell.outputs)) for cell in code]


@pytest.fixture
def notebook():
  return nbformat.read(PATH, as_version=4)


def test_it_is_valid_and_stored_without_outputs(notebook):
  nbformat.validate(notebook)
  code = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert code and all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(notebook, tmp_path):
  shown = _run(notebook, LNS_JAX_NOTEBOOK_BUDGET='tiny', LNS_JAX_NOTEBOOK_WORKDIR=str(tmp_path))
  assert 'on cpu' in shown[0] and 'A TPU is present' not in shown[0]
  everything = '\n'.join(shown)
  assert everything.count('<svg') == 1 + 1 + 3 + 2 + 2
  for words in ('validation loss', 'output variance of the last layer', 'raise the loss by less than 1%',
                'without (1, 4)'):
    assert words in everything
  assert (tmp_path / 'pre' / 'result.json').is_file() and (tmp_path / 'lns' / 'result.json').is_file()


@pytest.mark.slow
def test_a_tpu_that_jax_does_not_see_is_pointed_out(notebook):
  notebook.cells = [cell for cell in notebook.cells if cell.cell_type == 'code'][:1]
  shown, = _run(notebook, TPU_ACCELERATOR_TYPE='v5e-1')
  assert 'A TPU is present (TPU_ACCELERATOR_TYPE) but JAX sees only the CPU' in shown
