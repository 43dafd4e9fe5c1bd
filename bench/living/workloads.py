"""Two workloads that the shipped draft was not trained for: SQL, and questions in Spanish; and a mixture.

Their prompts are made from templates, so that there are thousands of them, and each has its own words, as the
traffic of one application has. A third workload is English, which the shipped draft knows: the fixed prompts
of `galley bench`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from galley.bench.closed_loop import tagged
from galley.bench.workloads import Prompt, fixed_workload

SQL, SPANISH, ENGLISH = "sql", "spanish", "english"
WORKLOADS = (SQL, SPANISH)
"""Those that the shipped draft was not trained for."""

_ENGLISH_SETS = ("chat", "code", "support")

_TABLES = {
    "orders": ("customer_id", "status", "total", "created_at"),
    "customers": ("name", "country", "email", "signed_up_at"),
    "products": ("title", "category", "price", "stock"),
    "invoices": ("order_id", "amount", "due_date", "paid"),
    "employees": ("name", "department", "salary", "hired_at"),
    "shipments": ("order_id", "carrier", "sent_at", "delivered_at"),
    "reviews": ("product_id", "rating", "author", "written_at"),
    "tickets": ("customer_id", "priority", "state", "opened_at"),
}
_SQL_TASKS = (
    "Write a SQL query that returns the {n} rows of {table} with the highest {column}.",
    "Write a SQL query that counts the rows of {table} for each {column}.",
    "Write a SQL query that returns all rows of {table} where {column} is not null, ordered by {other}.",
    "Write a SQL query that computes the average of {column} in {table} for each {other}.",
    "Write a SQL query that deletes the rows of {table} whose {column} is older than {n} days.",
    "Write a SQL statement that creates the table {table} with the columns {columns}.",
    "Write a SQL statement that adds an index on {column} and {other} of {table}.",
    "Write a SQL query that updates {column} of the row {n} in {table}.",
)

_THINGS = (
    "el agua",
    "el pan",
    "la luna",
    "el sol",
    "un volcán",
    "una biblioteca",
    "el ajedrez",
    "la fotosíntesis",
    "un terremoto",
    "el café",
    "la democracia",
    "un motor eléctrico",
    "la lluvia",
    "el invierno",
    "un hospital",
    "la música",
    "el aceite de oliva",
    "una guitarra",
    "el mar Mediterráneo",
    "la amistad",
    "un semáforo",
    "el correo electrónico",
    "la gravedad",
    "un panadero",
)
_SPANISH_TASKS = (
    "Explica en {n} frases qué es {thing}.",
    "Escribe un párrafo corto sobre {thing} para un niño de {n} años.",
    "Da {n} razones por las que {thing} es importante.",
    "Escribe un cuento de {n} frases en el que aparezca {thing}.",
    "¿Para qué sirve {thing}? Responde en {n} frases.",
    "Escribe {n} preguntas y respuestas sobre {thing}.",
)


def prompts(workload: str, seed: int) -> Iterator[Prompt]:
    """Yield prompts of the workload without end; the same ones for a seed."""
    drawn = random.Random(f"{workload} {seed}")
    english = [prompt.text for name in _ENGLISH_SETS for prompt in fixed_workload(name).prompts]
    number = 0
    while True:
        text = drawn.choice(english) if workload == ENGLISH else _made(workload, drawn)
        yield Prompt(f"{workload}-{seed}-{number}", text, label=workload, category=workload)
        number += 1


@dataclass(slots=True)
class Mixture:
    """Prompts of several workloads, drawn by their weights. A number before the text makes each a new one."""

    seed: int
    _streams: dict[str, Iterator[Prompt]] = field(default_factory=dict)
    _count: int = 0

    def next(self, weights: Mapping[str, float]) -> Prompt:
        """Return a prompt of one of these workloads."""
        drawn = random.Random(f"{self.seed} {self._count}")
        self._count += 1
        (workload,) = drawn.choices(list(weights), list(weights.values()))
        stream = self._streams.setdefault(workload, prompts(workload, self.seed))
        return tagged(next(stream), f"{self.seed}.{self._count}")

    def endless(self, weights: Mapping[str, float]) -> Iterator[Prompt]:
        while True:
            yield self.next(weights)


def _made(workload: str, drawn: random.Random) -> str:
    return _sql(drawn) if workload == SQL else _spanish(drawn)


def _sql(drawn: random.Random) -> str:
    table = drawn.choice(sorted(_TABLES))
    column, other = drawn.sample(_TABLES[table], 2)
    return drawn.choice(_SQL_TASKS).format(
        table=table, column=column, other=other, columns=", ".join(_TABLES[table]), n=drawn.randint(2, 90)
    )


def _spanish(drawn: random.Random) -> str:
    return drawn.choice(_SPANISH_TASKS).format(thing=drawn.choice(_THINGS), n=drawn.randint(2, 9))
