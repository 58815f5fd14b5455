"""Two records side by side: how far they are apart, where they diverge, and what that costs. No torch here."""
