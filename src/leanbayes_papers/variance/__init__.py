"""Variance Networks (Neklyudov, Molchanov, Ashukha, Vetrov, 2019)."""

PAPER = "Neklyudov, Molchanov, Ashukha, Vetrov, 2019: Variance Networks"
