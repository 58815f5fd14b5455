"""`ns.experiment`: the commands `noisescope experiment ...`, with their options."""

from noisescope.api.experiments import phases as phases
