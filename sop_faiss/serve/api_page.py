"""The page of the JSON endpoints: their OpenAPI description as plain HTML, with nothing from another site."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import Environment


def api_page(schema: dict[str, Any]) -> str:
    """Render the page of an OpenAPI description."""
    template = files("sop_faiss.serve").joinpath("api.html").read_text(encoding="utf-8")
    operations = [
        {
            "method": method.upper(),
            "path": path,
            "summary": operation.get("summary", ""),
            "parameters": [_parameter(each) for each in operation.get("parameters", [])],
            "body": operation.get("requestBody", {}),
            "responses": operation["responses"],
            "curl": _curl(method, path),
        }
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    schemas = {name: each for name, each in schema["components"]["schemas"].items() if "properties" in each}
    return page.render(info=schema["info"], operations=operations, schemas=schemas, kind=_kind)


def _parameter(parameter: dict[str, Any]) -> dict[str, str]:
    """Describe one parameter: name, type, bounds and meaning."""
    schema = parameter["schema"]
    needed = "required" if parameter["required"] else f"default {schema['default']}" if "default" in schema else ""
    text = parameter.get("description") or schema.get("description", "")
    return {"name": parameter["name"], "kind": _kind(schema), "needed": needed, "text": text}


def _kind(schema: dict[str, Any]) -> str:
    """Describe a type in words, as in `integer, 1 to 500`."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    least, most = schema.get("minimum"), schema.get("maximum")
    bounds = f", {least:g} to {most:g}" if most is not None else f", {least:g} or more" if least is not None else ""
    return f"{schema.get('type', 'any')}{bounds}"


def _curl(method: str, path: str) -> str:
    place = "http://127.0.0.1:8000" + path.replace("{row}", "0")
    is_search = path.startswith("/api/search")
    if path.endswith("together"):
        return f"""curl --json '{{"plus": [{{"key": "KEY"}}, {{"key": "KEY2"}}]}}' '{place}?k=5'"""
    if method == "post":
        address = f"'{place}?k=5'" if is_search else f"'{place}' > match.png"
        return f"curl -H 'Content-Type: application/octet-stream' --data-binary @photo.jpg {address}"
    if path.endswith("match"):
        return f"curl '{place}?key=KEY' > match.png"
    return f"curl '{place}?key=KEY&k=5'" if is_search else f"curl '{place}'"
