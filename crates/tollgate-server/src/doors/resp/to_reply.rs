//! From an answer to a reply, so that a field has the same name and place as in JSON.

use std::borrow::Cow;
use std::fmt::{self, Display};

use serde::ser::{Error, Impossible, SerializeMap, SerializeSeq, SerializeStruct, Serializer};
use serde::{Serialize, ser};

use super::reply::Reply;

/// Turns texts, numbers, lists and structs into replies. Answers hold nothing else.
pub(super) struct ToReply;

/// An answer that holds something else.
#[derive(Debug)]
pub(super) struct NotAReply(String);

impl Display for NotAReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotAReply {}

impl Error for NotAReply {
    fn custom<T: Display>(why: T) -> Self {
        Self(why.to_string())
    }
}

fn unsupported<T>() -> Result<T, NotAReply> {
    Err(NotAReply("the answer has a part that no reply can hold".to_owned()))
}

/// The items of a list.
pub(super) struct Items(Vec<Reply>);

/// The members of a struct or a map, and the name of the one whose value comes next.
pub(super) struct Members(Vec<(Cow<'static, str>, Reply)>, Cow<'static, str>);

type Outcome = Result<Reply, NotAReply>;

impl Serializer for ToReply {
    type Ok = Reply;
    type Error = NotAReply;
    type SerializeSeq = Items;
    type SerializeTuple = Impossible<Reply, NotAReply>;
    type SerializeTupleStruct = Impossible<Reply, NotAReply>;
    type SerializeTupleVariant = Impossible<Reply, NotAReply>;
    type SerializeMap = Members;
    type SerializeStruct = Members;
    type SerializeStructVariant = Impossible<Reply, NotAReply>;

    fn serialize_bool(self, it: bool) -> Outcome {
        Ok(Reply::Bool(it))
    }

    fn serialize_i64(self, number: i64) -> Outcome {
        Ok(Reply::Integer(number))
    }

    fn serialize_u64(self, number: u64) -> Outcome {
        Ok(Reply::Integer(i64::try_from(number).unwrap_or(i64::MAX)))
    }

    fn serialize_str(self, text: &str) -> Outcome {
        Ok(Reply::text(text.to_owned()))
    }

    fn serialize_none(self) -> Outcome {
        Ok(Reply::Null)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Outcome {
        value.serialize(self)
    }

    fn serialize_seq(self, length: Option<usize>) -> Result<Items, NotAReply> {
        Ok(Items(Vec::with_capacity(length.unwrap_or(0))))
    }

    fn serialize_map(self, length: Option<usize>) -> Result<Members, NotAReply> {
        Ok(Members(Vec::with_capacity(length.unwrap_or(0)), Cow::Borrowed("")))
    }

    fn serialize_struct(self, _: &'static str, length: usize) -> Result<Members, NotAReply> {
        self.serialize_map(Some(length))
    }

    fn serialize_i8(self, number: i8) -> Outcome {
        self.serialize_i64(number.into())
    }

    fn serialize_i16(self, number: i16) -> Outcome {
        self.serialize_i64(number.into())
    }

    fn serialize_i32(self, number: i32) -> Outcome {
        self.serialize_i64(number.into())
    }

    fn serialize_u8(self, number: u8) -> Outcome {
        self.serialize_u64(number.into())
    }

    fn serialize_u16(self, number: u16) -> Outcome {
        self.serialize_u64(number.into())
    }

    fn serialize_u32(self, number: u32) -> Outcome {
        self.serialize_u64(number.into())
    }

    fn serialize_f32(self, _: f32) -> Outcome {
        unsupported()
    }

    fn serialize_f64(self, _: f64) -> Outcome {
        unsupported()
    }

    fn serialize_char(self, _: char) -> Outcome {
        unsupported()
    }

    fn serialize_bytes(self, _: &[u8]) -> Outcome {
        unsupported()
    }

    fn serialize_unit(self) -> Outcome {
        Ok(Reply::Null)
    }

    fn serialize_unit_struct(self, _: &'static str) -> Outcome {
        unsupported()
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Outcome {
        Ok(Reply::text(variant))
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Outcome {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: &T,
    ) -> Outcome {
        unsupported()
    }

    fn serialize_tuple(self, _: usize) -> Result<Self::SerializeTuple, NotAReply> {
        unsupported()
    }

    fn serialize_tuple_struct(
        self,
        _: &'static str,
        _: usize,
    ) -> Result<Self::SerializeTupleStruct, NotAReply> {
        unsupported()
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self::SerializeTupleVariant, NotAReply> {
        unsupported()
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self::SerializeStructVariant, NotAReply> {
        unsupported()
    }
}

impl SerializeSeq for Items {
    type Ok = Reply;
    type Error = NotAReply;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), NotAReply> {
        self.0.push(value.serialize(ToReply)?);
        Ok(())
    }

    fn end(self) -> Outcome {
        Ok(Reply::List(self.0))
    }
}

impl SerializeStruct for Members {
    type Ok = Reply;
    type Error = NotAReply;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        name: &'static str,
        value: &T,
    ) -> Result<(), NotAReply> {
        self.0.push((Cow::Borrowed(name), value.serialize(ToReply)?));
        Ok(())
    }

    fn end(self) -> Outcome {
        Ok(Reply::Map(self.0))
    }
}

impl SerializeMap for Members {
    type Ok = Reply;
    type Error = NotAReply;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, name: &T) -> Result<(), NotAReply> {
        let Reply::Text(name) = name.serialize(ToReply)? else { return unsupported() };
        self.1 = name;
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), NotAReply> {
        self.0.push((std::mem::take(&mut self.1), value.serialize(ToReply)?));
        Ok(())
    }

    fn end(self) -> Outcome {
        ser::SerializeStruct::end(self)
    }
}
