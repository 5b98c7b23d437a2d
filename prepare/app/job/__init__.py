"""One job: build a model, prepare it, analyse it, and leave a record."""
