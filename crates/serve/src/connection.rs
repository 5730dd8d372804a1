//! A connection whose client has to take what is sent to it: one that takes nothing for too long is cut off, so that
//! what waits for it does not stay for ever.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// A stream with a limit on how long a write may stand still.
#[derive(Debug)]
pub(crate) struct Connection<S> {
    stream: S,
    limit: Duration,
    /// Runs while a write stands still.
    alarm: Option<Pin<Box<Sleep>>>,
}

impl<S> Connection<S> {
    pub(crate) fn new(stream: S, limit: Duration) -> Self {
        Self { stream, limit, alarm: None }
    }

    /// What became of a write: an error, if it has stood still for too long.
    fn watched<T>(&mut self, written: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.alarm = None;
            return written;
        }
        let limit = self.limit;
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        alarm.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watched(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.watched(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.watched(flushed, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.watched(shut, context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test]
    async fn who_takes_nothing_is_cut_off_and_who_is_slow_is_not() {
        let (near, mut far) = duplex(8);
        let mut connection = Connection::new(near, Duration::from_millis(20));
        let sent = tokio::spawn(async move {
            connection.write_all(&[1; 64]).await.unwrap();
            connection.write_all(&[2; 64]).await.unwrap_err().kind()
        });
        let mut taken = [0; 64];
        far.read_exact(&mut taken).await.unwrap();
        assert_eq!(sent.await.unwrap(), io::ErrorKind::TimedOut);
        assert_eq!(taken, [1; 64]);
    }
}
