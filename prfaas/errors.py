"""Errors of the command line.

PrfaasError            printed without a traceback
├── TopologyError      the topology file is wrong: names the key, the value and what is allowed
├── CertificateError   certificates cannot be made there
├── ConversionError    a node cannot be asked to change its role or to drain, or should not be
├── AskError           no gateway answers there, or it refuses
├── KeyNameError       no tenant can have that name
├── InitError          the answers make no system, or its files cannot be written
├── MembersError       a list of nodes cannot be read, or not be changed in that way
├── CheckError         there is no file that says whom to ask
└── StartError         a process did not come up, or a port is taken
    ├── StartRefused   a process found that it never can, as it is configured
    └── StartKilled    a process was ended from outside before it came up: that says nothing of whether it can
"""


class PrfaasError(Exception):
    """Base of all errors that a user of the command line sees."""


class TopologyError(PrfaasError):
    """The topology file cannot be used."""


class CertificateError(PrfaasError):
    """The folder cannot be written, or what it holds is no authority."""


class ConversionError(PrfaasError):
    """Names the node and what speaks against it."""


class AskError(PrfaasError):
    """Names the address and what came from there."""


class KeyNameError(PrfaasError):
    """Names what is no name."""


class InitError(PrfaasError):
    """Names the answer, or the files."""


class MembersError(PrfaasError):
    """Names the node, or the file, and what speaks against it."""


class CheckError(PrfaasError):
    """The gateway's file cannot be used."""


class StartError(PrfaasError):
    """A process did not start."""


class StartRefused(StartError):
    """A process found that it never can, as it is configured: says why."""


class StartKilled(StartError):
    """A signal from outside, or the kernel for want of memory, ended a process before it came up."""
