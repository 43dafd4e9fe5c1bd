"""`galley drafts`: the versions of a deployment's drafts."""
