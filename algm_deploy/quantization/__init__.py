"""From photos to int8: balanced channels, measured ranges, and which matrix products stay in fp32."""
