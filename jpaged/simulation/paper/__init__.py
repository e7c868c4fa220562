"""Figures of the PagedAttention paper (Kwon et al., SOSP 2023), its values beside ours."""
