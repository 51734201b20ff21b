"""Types of settings, in words and as placeholders of help texts."""

from typing import Any, Literal, get_args, get_origin


def type_in_words(kind: Any) -> str:
    """A type as one would say it.

    >>> type_in_words(float | None), type_in_words(Literal["a", "b"]), type_in_words(tuple[int, ...])
    ('a number or null', 'one of a, b', 'a list, each a whole number')
    """
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if kind in words:
        return words[kind]
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}" if len(get_args(kind)) > 1 else str(get_args(kind)[0])
    if get_origin(kind) in (tuple, list):
        return f"a list, each {type_in_words(get_args(kind)[0])}"
    return " or ".join(type_in_words(option) for option in get_args(kind)) or str(kind)


def type_name(kind: Any) -> str:
    """A type as a placeholder in a help text.

    >>> type_name(float), type_name(int | None), type_name(Literal["a", "b"])
    ('NUMBER', 'INTEGER|null', '{a,b}')
    """
    names = {int: "INTEGER", float: "NUMBER", bool: "{true,false}", str: "NAME", type(None): "null"}
    if kind in names:
        return names[kind]
    if get_origin(kind) is Literal:
        options = get_args(kind)
        return f"{{{','.join(map(str, options))}}}" if len(options) > 1 else str(options[0])
    if get_origin(kind) in (tuple, list):
        return f"[{type_name(get_args(kind)[0])},...]"
    return "|".join(type_name(option) for option in get_args(kind)) or "VALUE"
