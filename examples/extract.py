"""Extract a contact from a text, as an object: python examples/extract.py [HOST:PORT [TEXT]].

The answer is JSON by the schema of the class. The program needs pydantic: pip install pydantic.
"""

import argparse

from pydantic import BaseModel, ConfigDict, Field

from galley import Client

TEXT = "Write to Linh Tran, who manages the warehouse of Harbour & Sons: linh.tran@harbour.example."


class Contact(BaseModel):
    model_config = ConfigDict(extra="forbid")  # no further properties: a shorter and faster answer
    name: str = Field(max_length=40)
    company: str = Field(max_length=40)
    email: str = Field(max_length=60)


def main(address: str, text: str) -> None:
    prompt = f"Write the contact in this text as JSON, with name, company and email.\n\n{text}"
    with Client(address) as client:
        result = client.chat(prompt, schema=Contact, max_tokens=256, temperature=0.0)
    contact: Contact = result.parsed
    print(f"{contact.name} of {contact.company}, {contact.email}")
    forced = result.speculation.sources.get("grammar")
    count = forced.accepted if forced else 0
    print(f"{result.usage.output_tokens} tokens, {count} of them forced by the schema")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT", nargs="?", default="127.0.0.1:50051")
    parser.add_argument("text", metavar="TEXT", nargs="?", default=TEXT)
    main(**vars(parser.parse_args()))
