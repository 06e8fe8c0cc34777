"""Campaigns: conditions times seeds from one file. The runs go one after another, at the same time,
or on a Ray cluster.

`run_campaign` runs a campaign, and `plan_campaign` only says what would run. `Manifest.read` reads
the folder of a campaign.
"""

from retrain.campaign.manifest import Manifest, RunEntry, Status
from retrain.campaign.plan import CampaignPlan, CampaignRun, plan_campaign
from retrain.campaign.runner import run_campaign

__all__ = [
    "CampaignPlan",
    "CampaignRun",
    "Manifest",
    "RunEntry",
    "Status",
    "plan_campaign",
    "run_campaign",
]
