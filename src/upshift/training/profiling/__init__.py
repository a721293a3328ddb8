"""Measure for `upshift profile` how a run's steps spend their time, beside the planner's prediction."""
