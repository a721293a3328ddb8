"""Host + ModelProfile + Workload -> Plan: the space, its costs, the ranking, the trials, the reasons."""
