"""A process that is made up: what its system says that it holds now, and the most of late."""

from llmcli.measure import peaks

MIB = 2**20


class FakeProcess:
    """Holds 100 MiB, and more while `hold` takes it."""

    def __init__(self, monkeypatch):
        self.now = self.most = 100 * MIB
        monkeypatch.setattr(peaks, "_HIGHEST", {})
        monkeypatch.setattr(peaks, "_mark", lambda: self.most)
        monkeypatch.setattr(peaks, "_set_back", self._set_back)
        monkeypatch.setattr(peaks, "resident_bytes", lambda: self.now)

    def hold(self, mebibytes):
        """Takes so much, and gives it back."""
        self.most = max(self.most, self.now + mebibytes * MIB)

    def _set_back(self):
        self.most = self.now
        return True
