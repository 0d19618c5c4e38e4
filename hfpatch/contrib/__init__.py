"""Rarely needed features, registered like a third party's."""
