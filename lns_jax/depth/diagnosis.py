"""The report of a diagnosis: report.html, and its pictures as files."""

import hashlib
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from lns_jax import files
from lns_jax.depth import (findings, page, scorecard, sections, sections_cost, sections_gradient, sections_inside,
                           sections_jacobian, sections_task)

WORDS = (
    'Residual stream: the list of numbers (hidden units) that stands for a token and is handed from layer to layer. '
    'Each layer reads it and adds something to it, first its attention, which looks at other tokens, then its MLP.',
    'Norm: what brings the stream to one size, in most models before attention, MLP and head read it. LayerNorm '
    'Scaling (LNS) multiplies what a norm of layer l gives by one over the square root of l.',
    'Loss: how badly the next token is predicted, in nats per token; lower is better, and 1% of it is a small change. '
    'Of a model of images, how badly the class is.',
    'Curse of depth: in many trained models the stream grows from layer to layer, so that deep layers change little of '
    'it and can be taken out at little loss. This page measures how far that holds for these models.',
    'The paper: "The Curse of Depth in Large Language Models", arXiv 2502.05795. Nothing on this page takes for '
    'granted that it is right.',
)
LONGEST_NAME = 80  # of a picture's file, without its ending


def parts(models: Mapping[str, dict], histories: Mapping[str, list[dict]],
          arrays: Mapping[str, Mapping[str, np.ndarray]], angles: str = 'raw') -> list[sections.Section]:
  """All sections for which there is something to show, in order."""
  trained = {name: records for name, records in histories.items() if records}
  every = (
      sections.removal(models), sections_cost.pruning(models), *sections_task.parts(models),
      sections.variance(models, trained), sections_inside.theory(models), sections.angular(models, angles),
      sections.angular(models, angles, 'angular_last'), sections.influence(models),
      sections.branches(models, trained), sections.cosines(models), sections_inside.lens(models),
      sections_cost.sublayers(models), sections_cost.blocks(models), sections_cost.perturbation(models),
      sections_cost.linear(models), sections_inside.similarity(models), sections_inside.projection(models, arrays),
      sections_inside.projection(models, arrays, 'tsne'), sections_jacobian.blocks(models),
      sections_jacobian.heat_maps(models, arrays), sections_gradient.gradients(models),
      sections_gradient.decrease(models, trained))
  return [part for part in every if part]


def file_names(labels: Sequence[str]) -> list[str]:
  """A name of lower-case letters, digits and _ for each label; no two are the same.

  A name does not depend on the other labels, except where some would share it: it is the label's words, and where those
  are too long, or are those of another label too, a digest of the label in the place of their end.
  """
  words = [re.sub(r'\W+', '_', label, flags=re.ASCII).strip('_').lower() for label in labels]
  def name(i):
    if len(words[i]) <= LONGEST_NAME and words.count(words[i]) == 1:
      return words[i]
    twin = labels[:i].count(labels[i])
    digest = hashlib.sha256(f'{labels[i]} {twin}'.encode()).hexdigest()[:10]
    return f'{words[i][:LONGEST_NAME - 11]}_{digest}'
  return [name(i) for i in range(len(labels))]


def write(out: pathlib.Path, models: Mapping[str, dict], histories: Mapping[str, list[dict]],
          arrays: Mapping[str, Mapping[str, np.ndarray]], angles: str = 'raw', progress=lambda pictures: pictures):
  """Writes out/report.html, out/scorecard.md, and every picture as out/plots/NAME.svg and .png.

  Args:
    models: name -> depth.json. histories: name -> records of its metrics.jsonl; empty where there are none.
    arrays: name -> what depth.json is too small for.
    angles: how angular distances are shown, one of `sections.ANGLES`.
    progress: wraps the list of pictures that become files, for a bar.
  """
  shown = parts(models, histories, arrays, angles)
  title = f'What the layers do in {findings.listed(list(models))}' if len(models) <= 4 else f'{len(models)} models'
  body = [f'<h1>{page.text(title)}</h1>', *_opening(models), *(part.html() for part in shown), _footer(models)]
  (out / 'plots').mkdir(exist_ok=True)
  pictures = [picture for part in shown for picture in part.pictures]
  for picture, name in progress(list(zip(pictures, file_names([picture.label for picture in pictures])))):
    for kind in ('svg', 'png'):
      picture.figure.savefig(out / 'plots' / f'{name}.{kind}', dpi=200)
  files.write_text(out / 'scorecard.md', scorecard.markdown(models))
  files.write_text(out / 'report.html', page.page(f'lns_jax: {title}', ''.join(body)))


def _opening(models: Mapping[str, dict]) -> list[str]:
  heads, rows = scorecard.rows(models)
  said = [findings.together(models)]
  if findings.with_measure(models, 'layer_drop'):
    said.append(findings.removal(models)[1])
  if findings.with_measure(models, 'task_drop'):
    said.append(findings.task(models))
  if findings.with_measure(models, 'variance'):
    said.append(findings.last_variance(models))
  said += _different_rows(models)
  headline = findings.headline(models) or 'What was measured of each layer.'
  # Models in columns: on a telephone there is room for few.
  cells = [(head, *(row[i] for row in rows)) for i, head in enumerate(heads) if i]
  how = ('Numbers in brackets are 95% intervals over the sequences of the sample; they do not cover the spread between '
         'seeds of training. A layer that can be removed is no proof that depth was wasted: read this beside the loss.')
  return [page.paragraph(headline, 'lead'), page.facts([s for s in said if s]), page.paragraph(how, 'how'),
          page.details('What the words on this page mean', page.facts(WORDS)),
          page.table('Scorecard', ('', *models), cells)]


def _different_rows(models: Mapping[str, dict]) -> list[str]:
  """What models that were not measured on the same rows have in common, and what not."""
  hashes = lambda key: {found.get(key) for found in models.values()}
  if len(hashes('sample_hash')) <= 1:
    return []
  if len(hashes('text_hash')) > 1 or len(hashes('tokenizer')) <= 1:
    return ['These models were measured on different rows: their losses, and what is in percent of them, are not '
            'comparable.']
  return ['These models cut the same text into different tokens: a loss in nats per token says little of one beside '
          'another, bits per byte of text does, as far as the samples reach equally deep into the text.']


def _footer(models: Mapping[str, dict]) -> str:
  lines = [f'{name}: {found["path"]}, scheme {found["scheme"]}, {found["layers"]} layers, measured on '
           f'{found["sample"]}, in {found["dtype"]}.' for name, found in models.items()]
  lines += [f'{name}, {kind}: not taken. {why}' for name, found in models.items()
            for kind, why in found.get('refused', {}).items()]
  rows = [(kind, *(_taken(found, kind) for found in models.values()))
          for kind in dict.fromkeys(k for found in models.values() for k in found['measures'])]
  return (f'<footer><h2>What was measured</h2>{page.facts(lines)}'
          + page.table('Rows and seconds of each measure', ('measure', *models), rows) + '</footer>')


def _taken(found: dict, kind: str) -> str:
  taken = found['measures'].get(kind)
  return f'{taken["rows"]:,} rows, {taken["seconds"]:.1f} s' if taken else '–'
