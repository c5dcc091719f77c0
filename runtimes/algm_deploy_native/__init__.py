"""Holds the native libraries of algm-deploy as files beside this one, where algm-deploy finds them."""
