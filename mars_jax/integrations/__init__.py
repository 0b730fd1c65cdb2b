"""Thin bridges to other libraries."""
