"""The report of a diagnosis: report.html, and its pictures as files."""

import pathlib
import re
from collections.abc import Mapping

import numpy as np

from lns_jax import files
from lns_jax.depth import (findings, page, scorecard, sections, sections_cost, sections_gradient, sections_inside,
                           sections_jacobian, sections_task)


def parts(models: Mapping[str, dict], histories: Mapping[str, list[dict]],
          arrays: Mapping[str, Mapping[str, np.ndarray]]) -> list[sections.Section]:
  """All sections for which there is something to show, in order."""
  trained = {name: records for name, records in histories.items() if records}
  every = (
      sections.removal(models), sections_cost.pruning(models), *sections_task.parts(models), sections.variance(models, trained),
      sections_inside.theory(models), sections.angular(models), sections.influence(models),
      sections.branches(models, trained), sections.cosines(models), sections_inside.lens(models),
      sections_cost.sublayers(models), sections_cost.blocks(models), sections_cost.perturbation(models),
      sections_cost.linear(models), sections_inside.similarity(models), sections_jacobian.blocks(models),
      sections_jacobian.heat_maps(models, arrays), sections_gradient.gradients(models),
      sections_gradient.decrease(models, trained))
  return [part for part in every if part]


def write(out: pathlib.Path, models: Mapping[str, dict], histories: Mapping[str, list[dict]],
          arrays: Mapping[str, Mapping[str, np.ndarray]]):
  """Writes out/report.html, out/scorecard.md, and every picture as out/plots/NAME.svg and .png.

  Args:
    models: name -> depth.json. histories: name -> records of its metrics.jsonl; empty where there are none.
    arrays: name -> what depth.json is too small for.
  """
  shown = parts(models, histories, arrays)
  title = f'What the layers do in {findings.listed(list(models))}' if len(models) <= 4 else f'{len(models)} models'
  body = [f'<h1>{page.text(title)}</h1>', *_opening(models), *(part.html() for part in shown), _footer(models)]
  (out / 'plots').mkdir(exist_ok=True)
  for part in shown:
    for picture in part.pictures:
      name = re.sub(r'\W+', '_', picture.label).strip('_').lower()[:80]
      for kind in ('svg', 'png'):
        picture.figure.savefig(out / 'plots' / f'{name}.{kind}', dpi=200)
  files.write_text(out / 'scorecard.md', scorecard.markdown(models))
  files.write_text(out / 'report.html', page.page(f'lns_jax: {title}', ''.join(body)))


def _opening(models: Mapping[str, dict]) -> list[str]:
  heads, rows = scorecard.rows(models)
  said = findings.removal(models) if findings.with_measure(models, 'layer_drop') else []
  said += [findings.task(models)] if findings.with_measure(models, 'task_drop') else []
  said += [findings.last_variance(models)] if findings.with_measure(models, 'variance') else []
  headline = said.pop(0) if said else 'What was measured of each layer.'
  # Models in columns: on a telephone there is room for few.
  cells = [(head, *(row[i] for row in rows)) for i, head in enumerate(heads) if i]
  how = ('Intervals are 95% over the sequences of the sample; they do not cover the spread between seeds of training. A '
         'layer that can be removed is no proof that depth was wasted: read this beside the loss.')
  return [page.paragraph(headline, 'lead'), page.facts(said), page.paragraph(how, 'how'),
          page.table('Scorecard', ('', *models), cells)]


def _footer(models: Mapping[str, dict]) -> str:
  lines = [f'{name}: {found["path"]}, scheme {found["scheme"]}, {found["layers"]} layers, measured on {found["sample"]}, '
           f'in {found["dtype"]}.' for name, found in models.items()]
  rows = [(kind, *(_taken(found, kind) for found in models.values()))
          for kind in dict.fromkeys(k for found in models.values() for k in found['measures'])]
  return (f'<footer><h2>What was measured</h2>{page.facts(lines)}'
          + page.table('Rows and seconds of each measure', ('measure', *models), rows) + '</footer>')


def _taken(found: dict, kind: str) -> str:
  taken = found['measures'].get(kind)
  return f'{taken["rows"]:,} rows, {taken["seconds"]:.1f} s' if taken else '–'
