"""Encrypts a connection between two hosts, and lets both sides prove that they know a secret of this run.

TLS without certificates (anonymous Diffie-Hellman) needs nothing but the standard library, and does not show who is at
the other end. So each side then sends a digest of the secret and of this very connection (``tls-unique``, RFC 5929).
Somebody in between would have two connections, and the digest for one is wrong for the other.
"""

from __future__ import annotations

import hmac
import socket
import ssl
import tempfile

_CIPHER = "ADH-AES128-GCM-SHA256:@SECLEVEL=0"  # the level above forbids anonymous ciphers
# The group ffdhe2048 of RFC 7919.
_GROUP = b"""\
-----BEGIN DH PARAMETERS-----
MIIBCAKCAQEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEoXJf//////////wIBAg==
-----END DH PARAMETERS-----
"""
_DIGEST = "sha256"
_DIGEST_NBYTES = 32


def secure(connection: socket.socket, secret: bytes, *, serves: bool) -> ssl.SSLSocket:
    """Return the connection, encrypted and with a proof that the other side knows the secret.

    Args:
        connection: its timeout holds for each step. It stays open as long as the returned one, which has a file
            descriptor of its own; a shutdown of this one ends both.
        serves: this is the side that was connected to.

    Raises:
        OSError: the other side does not know the secret, or this Python's OpenSSL cannot do it.
    """
    secured = _context(serves).wrap_socket(connection.dup(), server_side=serves)
    try:
        ours, theirs = (b"serves", b"fetches") if serves else (b"fetches", b"serves")
        if serves:  # prove nothing to a stranger
            _check(secured, secret, theirs)
        secured.sendall(_proof(secured, secret, ours))
        if not serves:
            _check(secured, secret, theirs)
    except BaseException:
        secured.close()
        raise
    return secured


def read(connection: socket.socket, view: memoryview) -> None:
    """Fill ``view``. Raises OSError if the connection ends before."""
    while view:
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("the connection ended")
        view = view[got:]


def _check(secured: ssl.SSLSocket, secret: bytes, side: bytes) -> None:
    proof = bytearray(_DIGEST_NBYTES)
    read(secured, memoryview(proof))
    if not hmac.compare_digest(proof, _proof(secured, secret, side)):
        raise ConnectionError("the other side does not know the secret of this run")


def _proof(secured: ssl.SSLSocket, secret: bytes, side: bytes) -> bytes:
    binding = secured.get_channel_binding("tls-unique") if "tls-unique" in ssl.CHANNEL_BINDING_TYPES else None
    if not binding:
        raise ConnectionError("this connection has no channel binding")
    return hmac.digest(secret, side + binding, _DIGEST)


def _context(serves: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2  # 1.3 is not without certificates
    context.set_ciphers(_CIPHER)
    if serves:
        with tempfile.NamedTemporaryFile() as file:  # Python reads a group from a file alone
            file.write(_GROUP)
            file.flush()
            context.load_dh_params(file.name)
    return context
