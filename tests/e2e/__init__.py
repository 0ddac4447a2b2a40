"""The closed loop on the real local stack: HTTP in front, Redis, Ray, MLflow and the learner behind it."""
