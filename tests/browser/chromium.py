"""A headless Chromium that a test talks to: DevTools protocol over two pipes, with the standard library alone."""

import base64
import fcntl
import json
import os
import pathlib
import selectors
import shutil
import subprocess
import tempfile
import time

BROWSER = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
FLAGS = ('--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-sync',
         '--disable-background-networking', '--disable-component-update', '--disable-dev-shm-usage',
         '--hide-scrollbars', '--remote-debugging-pipe')


class Page:
  """What opening a page led to.

  Attributes:
    complaints: console errors and warnings, exceptions, and browser log entries, as text.
    requests: every URL asked for except the page's own and data: URLs.
  """

  def __init__(self, browser: 'Chromium', url: str):
    self._browser, self._url = browser, url
    self.complaints, self.requests = [], []

  def heard(self, event: dict):
    """Files an event of the protocol."""
    kind, p = event['method'], event['params']
    if kind == 'Network.requestWillBeSent':
      url = p['request']['url']
      if url != self._url and not url.startswith('data:'):
        self.requests.append(url)
    elif kind == 'Runtime.consoleAPICalled' and p['type'] in ('error', 'warning', 'assert'):
      self.complaints.append(' '.join(str(a.get('value', a.get('description'))) for a in p['args']))
    elif kind == 'Runtime.exceptionThrown':
      self.complaints.append(p['exceptionDetails']['text'])
    elif kind == 'Log.entryAdded' and p['entry']['level'] in ('error', 'warning'):
      self.complaints.append(p['entry']['text'])

  def value(self, expression: str):
    """A JavaScript expression's value, by value."""
    answer = self._browser.call('Runtime.evaluate', expression=expression, returnByValue=True)
    if 'exceptionDetails' in answer:
      raise AssertionError(answer['exceptionDetails'])
    return answer['result'].get('value')

  def screenshot(self, path: pathlib.Path):
    """The whole page as PNG."""
    size = self._browser.call('Page.getLayoutMetrics')['cssContentSize']
    shot = self._browser.call('Page.captureScreenshot', captureBeyondViewport=True,
                              clip={'x': 0, 'y': 0, 'width': size['width'], 'height': size['height'], 'scale': 1})
    pathlib.Path(path).write_bytes(base64.b64decode(shot['data']))


class Chromium:
  """A running browser; a context manager."""

  def __enter__(self):
    self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    (its_in, self._out), (self._in, its_out) = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (its_in, its_out)]  # so that 3 and 4 overwrite neither
    shell = f'exec "$0" "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
    self._process = subprocess.Popen(['bash', '-c', shell, BROWSER, *FLAGS, f'--user-data-dir={self._profile.name}'],
                                     pass_fds=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for fd in (its_in, its_out, *theirs):
      os.close(fd)
    self._wait = selectors.DefaultSelector()
    self._wait.register(self._in, selectors.EVENT_READ)
    self._buffer, self._events, self._number, self._session, self._page = b'', [], 0, None, None
    target = self.call('Target.createTarget', url='about:blank')['targetId']
    self._session = self.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
    for domain in ('Page', 'Network', 'Runtime', 'Log'):
      self.call(f'{domain}.enable')
    return self

  def __exit__(self, *_):
    try:
      self._session = None
      self.call('Browser.close')
      self._process.wait(10)
    finally:
      self._process.kill()
      self._process.wait()
      self._wait.close()
      os.close(self._in)
      os.close(self._out)
      self._profile.cleanup()

  def call(self, method: str, **params) -> dict:
    """One command and its result; events that arrive meanwhile go to the page."""
    self._number += 1
    number, message = self._number, {'id': self._number, 'method': method, 'params': params}
    if self._session:
      message['sessionId'] = self._session
    os.write(self._out, json.dumps(message).encode() + b'\0')
    while True:
      message = self._receive(30)
      if message.get('id') == number:
        if 'error' in message:
          raise RuntimeError(f'{method}: {message["error"]["message"]}')
        return message['result']

  def _receive(self, seconds: float) -> dict:
    """The next message; events are filed on the way."""
    while b'\0' not in self._buffer:
      if not self._wait.select(seconds):
        raise TimeoutError('Chromium did not answer')
      data = os.read(self._in, 1 << 20)
      if not data:
        raise RuntimeError('Chromium closed its pipe')
      self._buffer += data
    line, _, self._buffer = self._buffer.partition(b'\0')
    message = json.loads(line)
    if 'method' in message:
      self._events.append(message['method'])
      if self._page:
        self._page.heard(message)
    return message

  def open(self, path: pathlib.Path, width: int = 1280, scheme: str = 'light') -> Page:
    """Opens a file at a viewport width in CSS pixels, waits until it and its requests have settled."""
    url = pathlib.Path(path).absolute().as_uri()
    self.call('Emulation.setDeviceMetricsOverride', width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
    self.call('Emulation.setEmulatedMedia', features=[{'name': 'prefers-color-scheme', 'value': scheme}])
    self._page, self._events = Page(self, url), []
    self.call('Page.navigate', url=url)
    deadline = time.monotonic() + 30
    while 'Page.loadEventFired' not in self._events:
      self._receive(deadline - time.monotonic())
    # A promise that ends after two frames: whatever loading caused has reached us by then.
    self.call('Runtime.evaluate', awaitPromise=True,
              expression='new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))')
    return self._page
