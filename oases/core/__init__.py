"""Core of oases: a schedule is data, and is executed. Read this folder first."""
