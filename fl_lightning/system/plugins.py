"""Plug-ins that fail: whatever one raises or returns becomes an error that names its file, hook and line."""

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fl_lightning.errors import PLUGIN_PACKAGE, Diverged, PluginError, UserError
from fl_lightning.system.program import in_words


@contextmanager
def plugin_errors(part: object = None) -> Iterator[None]:
    """Whatever a plug-in raises in this block, `SystemExit` included, becomes a `PluginError`.

    Ctrl-C, refusals and divergence stay what they are, and so do errors of our own.

    Args:
        part: A method, say. If it is a plug-in, library code that fails in this block fails at what it has returned.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        named = plugin_error(error, part)
        if named is error:
            raise
        raise named from error


def plugin_error(error: BaseException, part: object = None) -> BaseException:
    """The error that names file, hook and line of a plug-in; the error itself where none has to do with it."""
    if isinstance(error, UserError | Diverged):
        return error
    if isinstance(error, Exception) and in_words(error) is not None:  # a lack of memory or disk
        return error
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if of_plugin(frame)]
    what = ": ".join(filter(None, [type(error).__name__, " ".join(str(error).split())[:300]]))
    if frames:
        (hook, _), (place, line) = frames[0], frames[-1]
        where = f"{place.f_code.co_filename}, line {line}, in {hook.f_code.co_qualname}"
    elif isinstance(error, Exception | SystemExit) and type(part).__module__.startswith(f"{PLUGIN_PACKAGE}."):
        where = (
            f"the plug-in {type(part).__module__.rpartition('.')[2]}, at what a hook of {type(part).__name__} returned"
        )
    else:
        return error
    named = PluginError(f"{where}: {what}; fix the plug-in")
    named.add_note("".join(traceback.format_exception(error)).rstrip())
    return named


def wrong(part: object, hook: str, expected: str, given: str) -> PluginError:
    """The error for what a hook has returned, with its place if it is a plug-in's."""
    cls = type(part)
    function = inspect.unwrap(getattr(cls, hook))
    where = ""
    if function.__module__.startswith(f"{PLUGIN_PACKAGE}."):
        where = f"{function.__code__.co_filename}, line {function.__code__.co_firstlineno}: "
    return PluginError(f"{where}{cls.__name__}.{hook} must return {expected}, got {given}; fix it")


def of_plugin(frame: FrameType) -> bool:
    """Whether a plug-in's own code is executed here; what dataclasses write for it is in no file."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith(f"{PLUGIN_PACKAGE}.") and not frame.f_code.co_filename.startswith("<")
