"""An EnvRunner without environments of its own: simulators dial it and bring theirs."""
