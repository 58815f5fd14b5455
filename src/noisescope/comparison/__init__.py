"""Two records side by side: how far they are apart, where they part, and what that costs. No torch here."""
